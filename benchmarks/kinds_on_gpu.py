"""Every kind of task in every lane of a GPU, with class weights, weights of rows and ignored entries, against a CPU.

    python benchmarks/kinds_on_gpu.py

Two rounds of FedAvg in float64; the table shows the largest difference from the serial lane of the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import kind_tasks
import tiny

from consilience.algorithms.fedavg import fedavg
from consilience.core import tree
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.engines.vectorised.engine import Vectorised
from consilience.task.task import Task

LANES = ("serial", "streams", "batched", "batched-matmul")


def main() -> None:
    """Print the table."""
    lines = []
    for kind, case in kind_tasks.CASES.items():
        settings: dict[str, Any] = {}
        if kind != "regression":
            width = 2 if kind == "binary" else case.outputs
            settings = {"class_weights": tuple(0.5 + k for k in range(width)), "label_smoothing": 0.1}
        draw = torch.Generator().manual_seed(0)
        clients = [case.rows(size, draw) for size in kind_tasks.SIZES]
        data = Federation.from_clients([(x, y, torch.rand(len(y), generator=draw) + 0.1) for x, y in clients])
        task = Task(kind_tasks.module(kind), kind, **settings)
        wanted = trained(task, data, "cpu", "serial")
        cells = [kind]
        for lane in LANES:
            try:
                cells.append(f"{tiny.gap(tree.to(trained(task, data, 'cuda', lane), 'cpu'), wanted):.1e}")
            except Exception as problem:
                cells.append(f"{type(problem).__name__}: {problem}"[:80])
        lines.append(cells)
    for cells in (["kind", *LANES], *lines):
        print(" | ".join(cells))


def trained(task: Task, data: Federation, device: str, lane: str) -> tree.Tree:
    """The model after two rounds."""
    engine = Vectorised(task, data, device=device, dtype="float64", lane=lane, clients_at_once=4)  # type: ignore[arg-type]
    *_, last = run(fedavg(lr=0.05, epochs=3, batch_size=4), engine, rounds=2, seed=1)
    return last.model


if __name__ == "__main__":
    main()
