"""Seconds per round of the Ray engine with 1, 2 ... workers against the vectorised engine, on this machine, in one run.

    python benchmarks/ray_workers.py [--model cnn] [--clients 16] [--steps 8] [--workers 1,2] [--rounds 4] [--threads 1]

Everyone trains in every round; all engines take one client at a time (lane "serial"), so that they do the same work.
The vectorised engine has one processor thread, as each worker has, or those of --threads. Start-up is shown apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.simprox import simprox
from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.core.tree import Tree
from consilience.engines.ray.cluster import RayCluster
from consilience.engines.vectorised.engine import Vectorised
from consilience.models import build
from consilience.selection import Everyone
from consilience.task.task import Task

SHAPES = {"cnn": (3, 32, 32), "mlp": (1, 28, 28), "resnet18": (3, 32, 32)}
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {"fedavg": fedavg, "simprox": simprox}


def federation(clients: int, rows: int, shape: tuple[int, ...]) -> Federation:
    """Noise, the same amount for everyone."""
    draw = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(rows, *shape, generator=draw), torch.randint(0, 10, (rows,), generator=draw))
        for _ in range(clients)
    ]
    return Federation.from_clients(pairs, classes=10)


def engines(settings: argparse.Namespace, task: Task, data: Federation) -> Iterator[tuple[str, int, Any]]:
    """(name, threads of this process, engine), one at a time."""
    same = {"lane": "serial", "device": "cpu", "dtype": settings.dtype}
    for threads in (int(number) for number in settings.threads.split(",")):
        yield f"vectorised, threads={threads}", threads, Vectorised(task, data, **same)
    for workers in (int(number) for number in settings.workers.split(",")):
        engine = RayCluster(task, data, workers=workers, **same)
        yield f"ray, workers={workers}", 1, engine
        engine.close()


def measured(algorithm: Algorithm, engine: Any, rounds: int) -> tuple[float, list[float], Tree]:
    """(seconds of the first round, which starts processes and traces; seconds of the others; the model)."""
    seconds, model = [], {}
    began = time.perf_counter()
    for done in run(algorithm, engine, rounds=rounds, seed=0):
        seconds.append(time.perf_counter() - began)
        model, began = done.model, time.perf_counter()
    return seconds[0], seconds[1:], model


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", choices=list(SHAPES), default="cnn")
    options.add_argument("--algorithm", choices=list(ALGORITHMS), default="fedavg")
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--workers", default="1,2")
    options.add_argument("--threads", default="1", help="of the vectorised engine")
    options.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    given = options.parse_args()
    shape = SHAPES[given.model]
    task = Task(build(given.model, inputs=shape, classes=10, seed=0))
    data = federation(given.clients, given.steps * given.batch, shape)
    algorithm = ALGORITHMS[given.algorithm](lr=0.05, epochs=1, batch_size=given.batch, selection=Everyone())
    print(f"{given.algorithm}, {task}, {given.clients} clients x {given.steps} steps of {given.batch}, {given.dtype}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    first: Tree | None = None
    for name, threads, engine in engines(given, task, data):
        torch.set_num_threads(threads)
        begin, others, model = measured(algorithm, engine, given.rounds)
        first = model if first is None else first
        same = all(torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(model)))
        bits = "the same bits" if same else "other bits"
        spread = f"{min(others):.2f} to {max(others):.2f}"
        print(f"{name:25} {statistics.median(others):7.2f} s a round ({spread}), first {begin:6.2f} s, {bits}")


if __name__ == "__main__":
    main()
