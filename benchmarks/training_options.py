"""All options of local training at once, in every lane of this machine: checks that lanes agree, measures the cost.

    python benchmarks/training_options.py [cuda|cpu]

Prints a table last: the largest difference from the serial lane in float64, and seconds per round in float32 with the
options and without. Code 1 if a lane differs by more than 1e-8.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import tiny
from declared import COMBINED

from consilience.algorithms.fedavg import fedavg
from consilience.core.rounds import run
from consilience.core.tree import Tree

LANES = ("serial", "batched", "batched-matmul", "streams")
ROUNDS = 3


def final(lane: str, device: str, dtype: str, **options: Any) -> tuple[Tree, float]:
    """(the last model on the CPU, seconds of the last round)."""
    sizes = [40 + 7 * k for k in range(8)]
    engine = tiny.engine(tiny.plain_convnet, tiny.federation(sizes), lane=lane, device=device, dtype=dtype)
    began, model, seconds = time.perf_counter(), engine.start(), 0.0
    for done in run(fedavg(**options), engine, rounds=ROUNDS, seed=3):
        if device == "cuda":
            torch.cuda.synchronize()
        model, now = done.model, time.perf_counter()
        began, seconds = now, now - began
    return {name: value.cpu() for name, value in model["params"].items()}, seconds


def main(device: str) -> int:
    """Compare and print."""
    every = {**COMBINED, "lr": 0.01, "epochs": 2, "batch_size": 16}
    plain = {"lr": 0.01, "epochs": 2, "batch_size": 16, "optimiser": "adamw", "weight_decay": 0.1}
    serial, rows, worst = final("serial", device, "float64", **every)[0], [], 0.0
    for lane in LANES:
        gap = tiny.gap(serial, final(lane, device, "float64", **every)[0])
        worst = max(worst, gap)
        rows.append((lane, gap, final(lane, device, "float32", **every)[1], final(lane, device, "float32", **plain)[1]))
    print(
        f"\n| lane ({device}) | largest difference | s/round, all options | s/round, AdamW alone |\n|---|---|---|---|"
    )
    for lane, gap, slow, fast in rows:
        print(f"| {lane} | {gap:.1e} | {slow:.3f} | {fast:.3f} |")
    return int(worst > 1e-8)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"))
