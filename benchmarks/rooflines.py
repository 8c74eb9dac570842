"""How far rounds on a GPU are from what the device can do: bytes, operations, kernels and gaps of every workload.

    python benchmarks/rooflines.py [--only cnn,vit] [--seconds 340] [--json rooflines.jsonl] [--host] [--small]

For every case: the whole round and the training in it (medians), rows per second, the most memory in use and reserved,
and, from one profiled round, kernels, the time in which the device works and the gaps, copies between host and device
that wait. The floor is the larger of two times: the operations of the module's forward and backward pass (counted by
torch) at the rate of a large matrix product, and the fewest bytes (parameters read in both passes, read and written by
the update; activations written once and read twice) at the rate of a large copy, both measured first. After every
case a line is printed, and written as JSON; cases that would begin after `--seconds` are left out. Every case is a
process of its own: what earlier cases leave in a process slows the host (the MLP's round took 9.4 ms after eleven other
cases, and 5.6 alone).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lanes import training_seconds
from sequence_models import Characters, Patches, tokens
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import consilience as cs
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.engines.vectorised.engine import Vectorised
from consilience.models import build
from consilience.task.task import Task

CNN = {"lane": "batched-matmul", "precision": "tf32", "compile": False}
AUTO = {"lane": "auto", "rounds_ahead": 1000}
LISTED = 40  # kinds of kernels of a round
STREAMS = {"lane": "streams", "compile": True}


@dataclass(frozen=True)
class Case:
    """So many clients, each doing so many steps of so many rows."""

    name: str
    model: Callable[[], nn.Module]
    rows: Callable[[int], Tensor]
    size: tuple[int, int, int]  # clients, steps, batch
    options: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "fedavg"


def pictures(side: int, channels: int = 3) -> Callable[[int], Tensor]:
    """Random pictures."""
    return lambda n: torch.randn(n, channels, side, side)


def mobilenet() -> nn.Module:
    """MobileNetV3-small."""
    import torchvision

    return torchvision.models.mobilenet_v3_small(num_classes=10)


def cases() -> list[Case]:
    """All, in the order in which they are measured."""
    cnn = lambda: build("cnn", inputs=(3, 32, 32), classes=10)  # noqa: E731
    mlp = lambda: build("mlp", inputs=(1, 28, 28), classes=10)  # noqa: E731
    resnet = lambda **o: lambda: build("resnet18", inputs=(3, 32, 32), classes=10, **o)  # noqa: E731
    vit = lambda: Patches(192, 6, 3)  # noqa: E731
    few, half = (6, 10, 64), {"precision": "bf16"}
    found = [Case(name, cnn, pictures(32), (50, 5, 10), CNN, name) for name in ("fedavg", "fedgen", "bulyan", "moon")]
    return [
        *found,
        Case("resnet18 imagenet stem", resnet(stem="imagenet"), pictures(32), few, {**half, "lane": "streams"}),
        Case("resnet18 cifar stem", resnet(stem="cifar"), pictures(32), few, {**half, "lane": "streams"}),
        Case("resnet18 group norm", resnet(stem="cifar", norm="group"), pictures(32), few, {**half, "lane": "streams"}),
        Case("vit", vit, pictures(32), (10, 20, 64), {**half, **AUTO, "compile": False}),
        Case("lstm", lambda: Characters(256, 2), tokens(80, 80), (10, 10, 32), {"lane": "batched", "compile": False}),
        Case("mobilenet", mobilenet, pictures(64), (8, 8, 32), {"precision": "tf32", **AUTO, "compile": False}),
        Case("resnet18 imagenet stem compiled", resnet(stem="imagenet"), pictures(32), few, {**half, **STREAMS}),
        Case("resnet18 cifar stem compiled", resnet(stem="cifar"), pictures(32), few, {**half, **STREAMS}),
        Case(
            "resnet18 group norm compiled", resnet(stem="cifar", norm="group"), pictures(32), few, {**half, **STREAMS}
        ),
        Case("mobilenet compiled", mobilenet, pictures(64), (8, 8, 32), {"precision": "tf32", **STREAMS}),
        Case("cnn compiled", cnn, pictures(32), (50, 5, 10), {**CNN, "compile": True}),
        Case("mlp compiled", mlp, pictures(28, 1), (100, 20, 50), {**CNN, "lane": "batched", "compile": True}),
        Case("500 clients", cnn, pictures(32), (500, 5, 10), {"precision": "tf32", **AUTO, "compile": False}),
        Case("500 clients compiled", cnn, pictures(32), (500, 5, 10), {"precision": "tf32", **AUTO}),
        Case("vit compiled", vit, pictures(32), (10, 20, 64), {**half, "lane": "batched-matmul", "compile": True}),
    ]


def ceilings(device: str) -> dict[str, float]:
    """Bytes per second of a large copy, operations per second of large products in each precision."""
    big = 4 if device == "cpu" else 256
    source = torch.randn(big * 2**20 // 4, device=device)
    target = torch.empty_like(source)
    found = {"bytes": 2 * big * 2**20 / fastest(lambda: target.copy_(source), device)}
    side = 512 if device == "cpu" else 8192
    for name, kind, fast in (
        ("full", torch.float32, False),
        ("tf32", torch.float32, True),
        ("bf16", torch.bfloat16, 0),
    ):
        a, b = (torch.randn(side, side, device=device).to(kind) for _ in "ab")
        torch.backends.cuda.matmul.allow_tf32 = bool(fast)
        found[name] = 2 * side**3 / fastest(lambda a=a, b=b: a @ b, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def fastest(action: Callable[[], Any], device: str) -> float:
    """Seconds, the least of five."""
    took = []
    for _ in range(6):
        wait(device)
        began = time.perf_counter()
        action()
        wait(device)
        took.append(time.perf_counter() - began)
    return min(took[1:])


def work_of(case: Case) -> tuple[float, float]:
    """(operations, bytes) that a round's training needs at least."""
    clients, steps, batch = case.size
    model, x, sizes = case.model().train(), case.rows(batch), list[int]()
    for part in model.modules():
        if not any(True for _ in part.children()):
            part.register_forward_hook(
                lambda _m, _i, out: sizes.append(sum(map(_numbers, torch.utils._pytree.tree_leaves(out))))
            )
    counter = FlopCounterMode(display=False)
    with counter:
        nn.functional.cross_entropy(model(x), torch.zeros(batch, dtype=torch.int64)).backward()
    kept = sum(p.numel() for p in model.parameters())
    width = 2 if case.options.get("precision") == "bf16" else 4
    moved = 4 * 4 * kept + 3 * width * sum(sizes) + x.numel() * x.element_size()
    return float(counter.get_total_flops() * clients * steps), float(moved * clients * steps)


def _numbers(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 0


def wait(device: str) -> None:
    """Until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, device: str, ceiling: dict[str, float], host: bool) -> dict[str, Any]:
    """All figures of a case."""
    torch.manual_seed(0)
    clients, steps, batch = case.size
    data = [(case.rows(steps * batch), torch.randint(0, 10, (steps * batch,))) for _ in range(clients)]
    operations, least = work_of(case)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    engine = Vectorised(Task(case.model()), Federation.from_clients(data), device=device, **case.options)
    rounds = run(getattr(cs, case.algorithm)(lr=0.05, batch_size=batch), engine, rounds=10**6)
    one_round = lambda: next(rounds) and None  # noqa: E731
    for _ in range(3):
        one_round()
    wait(device)
    first = time.perf_counter() - began
    took = []
    while len(took) < 3 or (len(took) < 15 and sum(took) < 1.5):
        began = time.perf_counter()
        one_round()
        wait(device)
        took.append(time.perf_counter() - began)
    whole = sorted(took)[len(took) // 2]
    training = training_seconds(one_round, engine, torch.device(device), min(9, len(took)))
    choice = engine.choice
    found: dict[str, Any] = {
        "case": case.name,
        "lane": choice.lane + ("+compile" if choice.compile else "") + f" by {choice.clients_at_once}",
        "ms": whole * 1e3,
        "training_ms": training * 1e3,
        "rows_per_s": clients * steps * batch / whole,
        "start_s": first,
        "floor_ms": 1e3 * max(operations / ceiling[case.options.get("precision", "full")], least / ceiling["bytes"]),
        "gflop": operations / 1e9,
        "gbyte": least / 1e9,
    }
    if device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        found |= kernels(one_round) | waits(one_round)
    if host:
        profile_host(one_round, device)
    return found


def kernels(one_round: Callable[[], None]) -> dict[str, Any]:
    """Kernels of a round, the time in which any of them runs, and the longest kinds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        one_round()
        torch.cuda.synchronize()
    spans, by_name, times = list[tuple[int, int]](), Counter[str](), Counter[str]()
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            by_name[event.name()] += event.duration_ns()
            times[event.name()] += 1
    spans.sort()
    busy, end = 0, 0
    for start, stop in spans:
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    longest = [f"{name[:90]} x{times[name]} {time / 1e6:.2f}" for name, time in by_name.most_common(LISTED)]
    span = (end - spans[0][0]) / 1e6 if spans else 0.0
    return {"kernels": len(spans), "busy_ms": busy / 1e6, "gaps_ms": span - busy / 1e6, "longest": longest}


def waits(one_round: Callable[[], None]) -> dict[str, Any]:
    """How often the host waits for the device in a round, and where."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            one_round()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    sync = [one for one in caught if "synchroniz" in str(one.message)]
    where = Counter(f"{Path(one.filename).name}:{one.lineno}" for one in sync)
    return {"waits": len(sync), "waits_at": [f"{place} x{times}" for place, times in where.most_common(8)]}


def profile_host(one_round: Callable[[], None], device: str) -> None:
    """Print what the host does in three rounds."""
    profile = cProfile.Profile()
    wait(device)
    profile.enable()
    for _ in range(3):
        one_round()
    wait(device)
    profile.disable()
    pstats.Stats(profile).sort_stats("cumulative").print_stats("consilience|synchronize|method", 32)


def table(found: list[dict[str, Any]]) -> str:
    """All cases."""
    names = ("case", "lane", "ms", "training_ms", "floor_ms", "rows_per_s", "peak_gib", "reserved_gib", "kernels")
    names = (*names, "busy_ms", "gaps_ms", "waits", "gflop", "gbyte", "start_s")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in found:
        if "error" in row:
            lines.append(f"| {row['case']} | {row['error'][:160]} |")
            continue
        cells = [row.get(name, "") for name in names]
        shown = [f"{cell:,.{0 if abs(cell) > 999 else 1}f}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def usable() -> dict[str, Any]:
    """The device to measure."""
    return {"device": "cuda" if torch.cuda.is_available() else "cpu"}


def apart(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the action returns in a process of its own; {"error": ...} where it fails: that is a finding, too."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            found = action()
        except Exception as problem:
            found = {"error": f"{type(problem).__name__}: {' '.join(str(problem).split())[:400]}"}
        with os.fdopen(writing, "w") as out:
            out.write(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as text:
        found = text.read()
    _, status = os.waitpid(child, 0)
    return json.loads(found) if found else {"error": f"ended with {os.waitstatus_to_exitcode(status)}"}


def main() -> None:
    """Measure, and print the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--seconds", type=float, default=340)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--host", action="store_true", help="also print what the host does")
    parser.add_argument("--small", action="store_true", help="a few clients and steps, to try the script")
    options = parser.parse_args()
    began, found = time.perf_counter(), list[dict[str, Any]]()
    # asked in another process: one that has used CUDA cannot be forked
    device = apart(usable)["device"] if options.device == "auto" else options.device
    ceiling = apart(lambda: ceilings(device))
    print({name: f"{value:.3g}/s" for name, value in ceiling.items()}, flush=True)
    wanted = [part for part in options.only.split(",") if part]
    for case in cases():
        if (wanted and not any(part in case.name for part in wanted)) or time.perf_counter() - began > options.seconds:
            continue
        if options.small:
            clients, steps, batch = case.size
            case = replace(case, size=(min(clients, 8), min(steps, 2), min(batch, 8)))
        row = apart(lambda case=case: measure(case, device, ceiling, options.host))
        row.setdefault("case", case.name)
        row["at_s"] = round(time.perf_counter() - began, 1)
        found.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
