"""Transformers in a round of federated training: rows a second and peak memory, by hand and with consilience.

    python benchmarks/adapters_speed.py                       # on a GPU: some minutes, most of them compiling
    python benchmarks/adapters_speed.py --small --device cpu  # a check of the script itself

Workloads, of 20 clients x 10 steps each: BERT base with LoRA (rank 8 on queries and values, and the head), 16 rows of
128 tokens; and an encoder of 4 layers, 256 wide, all of it trained, 32 rows of 64 tokens. "By hand" trains clients one
after another with `torch.optim.SGD`, and autocast for bf16; three of the clients are timed. No dropout, so that both
sides compute the same; `--masked` makes half of the texts shorter. "Any order" is
`deterministic = false`.
The peak is what PyTorch reserved from the first round on, with tracing and capturing. The last lines are a table.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import consilience as cs
from consilience.core.rounds import run

CLASSES, RATE, TIMED_BY_HAND = 77, 0.01, 3
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Workload:
    """A model, and what each client does in a round."""

    name: str
    config: dict[str, Any]
    options: dict[str, Any]
    rows: int
    tokens: int
    clients: int = 20
    steps: int = 10
    masked: bool = False

    def model(self) -> nn.Module:
        """The model with random weights."""
        shape: Any = {"input_ids": (self.tokens,), "attention_mask": (self.tokens,)} if self.masked else (self.tokens,)
        size = {} if self.masked else {"vocabulary": self.config["vocab_size"]}
        options = {"config": self.config, "length": self.tokens, **size, **self.options}
        return cs.build_model("hugging_face", shape, CLASSES, seed=0, **options)

    def data(self) -> cs.Federation:
        """Random token numbers: what they are does not change the time."""
        draw, count = torch.Generator().manual_seed(0), self.steps * self.rows
        clients: list[Any] = []
        for _ in range(self.clients):
            x = torch.randint(5, self.config["vocab_size"], (count, self.tokens), generator=draw)
            y = torch.randint(0, CLASSES, (count,), generator=draw)
            mask = torch.ones_like(x)
            mask[::2, self.tokens * 3 // 4 :] = 0
            clients.append(({"input_ids": x, "attention_mask": mask} if self.masked else x, y))
        return cs.Federation.from_clients(clients, classes=CLASSES)


WORKLOADS = (
    Workload(
        name="BERT base, LoRA rank 8, 16 x 128 tokens",
        config={"model_type": "bert", "vocab_size": 30522, **NO_DROPOUT},
        options={"train": "lora", "rank": 8},
        rows=16,
        tokens=128,
    ),
    Workload(
        name="encoder, 4 layers of 256, 32 x 64 tokens",
        config={
            **{"model_type": "bert", "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4},
            **{"num_attention_heads": 4, "intermediate_size": 1024, **NO_DROPOUT},
        },
        options={"train": "all"},
        rows=32,
        tokens=64,
    ),
)


def by_hand(work: Workload, device: str, bf16: bool) -> tuple[Callable[[], None], int]:
    """(a round of some clients, how many rows that is): each trains from the global values."""
    model = work.model().to(device).train()
    rows = work.data().train.to(device)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    clients = min(TIMED_BY_HAND, work.clients)

    def a_round() -> None:
        values = dict(model.named_parameters())
        for client in range(clients):
            with torch.no_grad():
                for name in names:
                    values[name].copy_(start[name])
            solver = torch.optim.SGD([values[name] for name in names], lr=RATE)
            x, y = rows.of(client)[:2]
            for step in range(work.steps):
                part = slice(step * work.rows, (step + 1) * work.rows)
                given = {key: value[part] for key, value in x.items()} if isinstance(x, dict) else x[part]
                with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=bf16):
                    loss = nn.functional.cross_entropy(model(given).float(), y[part])
                solver.zero_grad(set_to_none=True)
                loss.backward()
                solver.step()

    return a_round, clients * work.steps * work.rows


def ours(work: Workload, device: str, bf16: bool, **settings: Any) -> tuple[Callable[[], None], int]:
    """(a round by the engine, all clients at once, how many rows that is)."""
    engine = cs.Vectorised(
        cs.Task(work.model()),
        work.data(),
        device=device,
        precision="bf16" if bf16 else "full",
        lane="batched",
        clients_at_once=work.clients,
        **settings,
    )
    rounds = run(cs.fedavg(lr=RATE, epochs=1, batch_size=work.rows), engine, rounds=10**6, seed=0)
    return functools.partial(next, rounds), work.clients * work.steps * work.rows


WAYS: dict[str, tuple[str, Callable[..., tuple[Callable[[], None], int]]]] = {
    "hand": ("by hand", by_hand),
    "plain": ("consilience", functools.partial(ours, compile=False)),
    "compiled": ("consilience, compiled", functools.partial(ours, compile=True)),
    "free": ("consilience, compiled, any order", functools.partial(ours, compile=True, deterministic=False)),
}


def measured(make: Callable[[], tuple[Callable[[], None], int]], device: str, profiled: int = 0) -> tuple[float, float]:
    """(rows a second, peak GiB from the first round on); the `profiled` longest kernels of one more round are shown."""
    cuda = device.startswith("cuda")
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    a_round, rows = make()
    times = []
    for _ in range(4):  # the first two trace, capture and compile
        began = time.perf_counter()
        a_round()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_reserved() / 2**30 if cuda else float("nan")
    if profiled:
        show_kernels(a_round, profiled)
    return rows / min(times[2:]), peak


def show_kernels(a_round: Callable[[], None], count: int) -> None:
    """The kernels that take longest in a round: how often, how long each, how long together."""
    kinds = [torch.profiler.ProfilerActivity.CUDA if torch.cuda.is_available() else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        a_round()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    spent = {
        row.key: (row.count, row.self_device_time_total or row.self_cpu_time_total) for row in profile.key_averages()
    }
    total = sum(time for _, time in spent.values())
    print(f"{total / 1e3:.1f} ms in {sum(count for count, _ in spent.values())} kernels")
    for name, (times, time_us) in sorted(spent.items(), key=lambda one: -one[1][1])[:count]:
        print(f"{time_us / 1e3:9.2f} ms {time_us / total:6.1%} {times:6d} x {time_us / times:9.1f} us  {name[:150]}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precisions", default="bf16", help="bf16, fp32 or both with a comma between")
    parser.add_argument("--ways", default="hand,plain,compiled", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--workloads", default="", help="a part of their names")
    parser.add_argument("--masked", action="store_true", help="with an attention mask: half of the texts are shorter")
    parser.add_argument("--profile", type=int, default=0, help="show so many of the kernels that take longest")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows of the table")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for work in WORKLOADS:
        if given.workloads not in work.name:
            continue
        if given.masked:
            work = replace(work, name=f"{work.name}, masked", masked=True)
        if given.small:
            tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
            work = replace(work, config={**work.config, **tiny}, clients=2, steps=2, rows=2, tokens=16)
        for precision in given.precisions.split(","):
            for way in given.ways.split(","):
                label, make = WAYS[way]
                try:
                    made = functools.partial(make, work, given.device, precision == "bf16")
                    speed, peak = measured(made, given.device, given.profile)
                except Exception as problem:  # the others are still of interest
                    print(f"{work.name}, {label}: {type(problem).__name__}: {problem}", flush=True)
                    continue
                row = {"workload": work.name, "precision": precision, "how": label, "rows_per_s": speed, "gib": peak}
                print(json.dumps(row), flush=True)
                rows.append(row)
                if given.out:
                    given.out.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n| Workload | Precision | How | Rows/s | Peak GiB |\n|---|---|---|---|---|")
    for row in rows:
        start = f"| {row['workload']} | {row['precision']} | {row['how']} "
        print(f"{start}| {row['rows_per_s']:,.0f} | {row['gib']:.1f} |")


if __name__ == "__main__":
    main()
