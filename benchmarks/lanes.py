"""Seconds per round of every lane against a loop written by hand in PyTorch, on this machine, in one run.

    python benchmarks/lanes.py [--device cuda] [--small] [--only mlp,cnn] [--repeat 5]

The first column is plain PyTorch: one client after another, eager, torch.optim.SGD. Ratios are to it.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from consilience.algorithms.fedavg import fedavg
from consilience.core.algorithm import Algorithm
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.engines.vectorised.engine import Vectorised
from consilience.models import build
from consilience.task.task import Task


@dataclass(frozen=True)
class Workload:
    """So many clients, each doing so many steps of so many rows, all alike."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    steps: int
    batch: int
    lr: float = 0.05


def peer_cnn() -> nn.Module:
    """The CIFAR-10 network of a peer's benchmark (2 conv, 2 dense)."""
    return build("cnn", inputs=(3, 32, 32), classes=10)


def workloads(small: bool) -> list[Workload]:
    """The four of docs/performance.md; `small` shrinks them for two CPU cores."""
    mlp = lambda: build("mlp", inputs=(1, 28, 28), classes=10)  # noqa: E731
    resnet = lambda stem: lambda: build("resnet18", inputs=(3, 32, 32), classes=10, stem=stem)  # noqa: E731
    if small:
        return [
            Workload("cnn", peer_cnn, (3, 32, 32), 10, 5, 10),
            Workload("mlp", mlp, (1, 28, 28), 20, 20, 50),
            Workload("resnet18 (ImageNet stem)", resnet("imagenet"), (3, 32, 32), 2, 2, 16),
        ]
    return [
        Workload("cnn", peer_cnn, (3, 32, 32), 50, 5, 10),
        Workload("mlp", mlp, (1, 28, 28), 100, 20, 50),
        Workload("resnet18 (ImageNet stem)", resnet("imagenet"), (3, 32, 32), 6, 10, 64),
        Workload("resnet18 (CIFAR stem)", resnet("cifar"), (3, 32, 32), 6, 10, 64),
    ]


def by_hand(w: Workload, federation: Federation, device: torch.device) -> Callable[[], None]:
    """A round of FedAvg as people write it."""
    server = w.model().to(device)
    data = [(x.to(device), y.to(device)) for x, y in (federation.train.of(k) for k in range(w.clients))]

    def one_round() -> None:
        total: dict[str, torch.Tensor] | None = None
        for x, y in data:
            model = copy.deepcopy(server)
            optimiser = torch.optim.SGD(model.parameters(), lr=w.lr)
            for rows in torch.randperm(len(y), device=device).split(w.batch):
                optimiser.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimiser.step()
            values = model.state_dict()
            total = values if total is None else {k: total[k] + v for k, v in values.items()}
        assert total is not None
        server.load_state_dict({k: v / w.clients for k, v in total.items()})

    return one_round


def ours(w: Workload, federation: Federation, **options: object) -> tuple[Callable[[], None], Vectorised]:
    """The same round by the engine, selection, plan drawing, averaging and screening included."""
    engine = Vectorised(Task(w.model()), federation, **options)  # type: ignore[arg-type]
    algorithm: Algorithm = fedavg(lr=w.lr, epochs=1, batch_size=w.batch)
    rounds = run(algorithm, engine, rounds=10**6)
    return lambda: next(rounds) and None, engine


def seconds(one_round: Callable[[], None], device: torch.device, repeat: int) -> tuple[float, float]:
    """(first call, median of the later ones); the first carries tracing, capture, compilation."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    took = []
    for _ in range(repeat + 2):
        wait()
        began = time.perf_counter()
        one_round()
        wait()
        took.append(time.perf_counter() - began)
    later = sorted(took[2:])
    return took[0], later[len(later) // 2]


def training_seconds(one_round: Callable[[], None], engine: Vectorised, device: torch.device, repeat: int) -> float:
    """The local steps of a round alone, from the carry to the carry: what the prototypes measured."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    fold, took = engine._tuner.fold, []

    def timed(*arguments: Any) -> Any:
        wait()
        began = time.perf_counter()
        done = fold(*arguments)
        wait()
        took[-1] += time.perf_counter() - began
        return done

    engine._tuner.fold = timed  # type: ignore[method-assign]
    for _ in range(repeat):
        took.append(0.0)
        one_round()
    engine._tuner.fold = fold  # type: ignore[method-assign]
    return sorted(took)[len(took) // 2]


def variants(device: torch.device) -> dict[str, dict[str, object]]:
    """The lanes to time."""
    if device.type == "cpu":
        return {lane: {"lane": lane} for lane in ("serial", "streams", "batched", "auto")}
    named: dict[str, dict[str, object]] = {"serial": {"lane": "serial", "precision": "tf32"}}
    for lane in ("batched", "batched-matmul"):
        for precision in ("full", "tf32"):
            named[f"{lane} {precision}"] = {"lane": lane, "precision": precision, "compile": False}
            named[f"{lane} {precision} compiled"] = {"lane": lane, "precision": precision, "compile": True}
    for precision in ("full", "tf32", "bf16"):
        named[f"streams {precision}"] = {"lane": "streams", "precision": precision, "compile": False}
    named["streams bf16 any-algorithm"] = {"lane": "streams", "precision": "bf16", "deterministic": False}
    named["auto bf16"] = {"lane": "auto", "precision": "bf16"}
    return named


def main() -> None:
    """Print a table per workload; `--json` keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="shrink the workloads (default on a CPU)")
    parser.add_argument("--only", default="", help="part of a workload's name")
    parser.add_argument("--lanes", default="", help="comma-separated parts of lane names")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU"
    print(f"torch {torch.__version__} on {where}, {torch.get_num_threads()} threads\n")
    found = []
    for w in workloads(options.small or device.type == "cpu"):
        if options.only not in w.name:
            continue
        generator = torch.Generator().manual_seed(0)
        size = w.steps * w.batch
        clients = [
            (torch.randn(size, *w.shape, generator=generator), torch.randint(10, (size,), generator=generator))
            for _ in range(w.clients)
        ]
        federation = Federation.from_clients(clients)
        rows = w.clients * size
        print(f"### {w.name}: {w.clients} clients x {w.steps} steps x batch {w.batch}\n")
        print(
            f"| lane | ms a round | of it training | x by hand | rows/s | first round s | note |\n|{'---|' * 7}",
            flush=True,
        )
        first, base = seconds(by_hand(w, federation, device), device, max(2, options.repeat // 2))
        print(f"| by hand, eager | {base * 1e3:,.1f} | | 1.0 | {rows / base:,.0f} | {first:.1f} | |", flush=True)
        for name, setting in variants(device).items():
            if options.lanes and not any(part in name for part in options.lanes.split(",")):
                continue
            try:
                one_round, engine = ours(w, federation, device=str(device), **setting)
                first, took = seconds(one_round, device, options.repeat)
                training = training_seconds(one_round, engine, device, options.repeat)
            except Exception as problem:  # a lane that cannot run this model is a finding, not a failure
                print(f"| {name} | - | - | - | - | - | {type(problem).__name__}: {str(problem)[:90]!r} |", flush=True)
                continue
            note = engine.choice.lane if name.startswith("auto") else ""
            times = {"seconds": took, "training": training, "by_hand": base, "first": first}
            found.append({"workload": w.name, "lane": name, **times})
            speed = f"{took * 1e3:,.1f} | {training * 1e3:,.1f} | {base / took:,.1f} | {rows / took:,.0f}"
            print(f"| {name} | {speed} | {first:.1f} | {note} |", flush=True)
            del one_round, engine
            if device.type == "cuda":
                torch.cuda.empty_cache()
        print()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
