"""Rounds of the Ray engine with 1, 2 ... workers against the vectorised engine, on this machine, in one run.

    python benchmarks/ray_workers.py [--model cnn] [--clients 16] [--steps 8] [--workers 1,2] [--rounds 4] [--threads 1]

Everyone trains in every round; all engines take one client at a time (lane "serial"), so that they do the same work.
The vectorised engine has one processor thread, as each worker has, or those of --threads. All engines are started
first, and then alternate round by round, so that other work on the machine slows all of them equally; start-up is
shown separately. "CPU" are the CPU seconds of the driver and of each worker in a round: on an otherwise idle machine,
a round takes about as long as the driver and the slowest worker together, one after the other. The last column is how
much faster that would be than with one worker; on a busy machine only this column is meaningful.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.scaffold import scaffold
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
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {"fedavg": fedavg, "simprox": simprox, "scaffold": scaffold}


class Measured(NamedTuple):
    """One round."""

    seconds: float
    driver: float  # processor seconds
    workers: list[float]


class Competitor:
    """An engine with its run, advanced a round at a time."""

    def __init__(self, name: str, threads: int, engine: Any, algorithm: Algorithm, rounds: int) -> None:
        self.name, self._threads, self._engine = name, threads, engine
        self._rounds = run(algorithm, engine, rounds=rounds, seed=0)
        self.first = 0.0
        self.rounds: list[Measured] = []
        self.model: Tree = {}

    def advance(self) -> None:
        """One round; the first starts processes and traces."""
        torch.set_num_threads(self._threads)
        pids = self._pids()
        before, own, began = [_cpu(pid) for pid in pids], time.process_time(), time.perf_counter()
        self.model = next(self._rounds).model
        seconds, driver = time.perf_counter() - began, time.process_time() - own
        if not self.first:
            self.first = seconds
        else:
            self.rounds.append(Measured(seconds, driver, [_cpu(pid) - cpu for pid, cpu in zip(pids, before)]))

    @property
    def alone(self) -> float:
        """Seconds of a round on a machine that does nothing else: the driver's, and the slowest worker's."""
        return median([each.driver + max(each.workers, default=0.0) for each in self.rounds])

    def close(self) -> None:
        """End its processes."""
        self._engine.close()

    def _pids(self) -> list[int]:
        pool = getattr(self._engine, "_pool", None)
        return [] if pool is None else pool.pids()


def _cpu(pid: int) -> float:
    """Processor seconds that the threads of a process have used, as the scheduler counts them."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text(encoding="ascii").split()[0]) for thread in threads) / 1e9


def federation(clients: int, rows: int, shape: tuple[int, ...]) -> Federation:
    """Noise, the same amount for everyone."""
    draw = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(rows, *shape, generator=draw), torch.randint(0, 10, (rows,), generator=draw))
        for _ in range(clients)
    ]
    return Federation.from_clients(pairs, classes=10)


def competitors(given: argparse.Namespace, task: Task, data: Federation, algorithm: Algorithm) -> list[Competitor]:
    """All engines."""
    same = {"lane": "serial", "device": "cpu", "dtype": given.dtype}
    threads = [int(number) for number in given.threads.split(",")]
    found = [
        Competitor(f"vectorised, {t} thread{'s' * (t > 1)}", t, Vectorised(task, data, **same), algorithm, given.rounds)
        for t in threads
    ]
    for workers in (int(number) for number in given.workers.split(",")):
        engine = RayCluster(task, data, workers=workers, num_cpus=0.1, **same)  # they take turns on the same cores
        found.append(Competitor(f"Ray, {workers} worker{'s' * (workers > 1)}", 1, engine, algorithm, given.rounds))
    return found


def median(values: list[float]) -> float:
    """Of the rounds after the first."""
    return statistics.median(values)


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
    engines = competitors(given, task, data, algorithm)
    try:
        for _ in range(given.rounds):
            for engine in engines:
                engine.advance()
        print(
            "| Engine | A round, s | min to max | Against 1 worker | CPU of driver, s | CPU of workers, s "
            "| First, s | By CPU |"
        )
        print("|---|---|---|---|---|---|---|---|")
        one = next((engine for engine in engines if engine.name == "Ray, 1 worker"), engines[0])
        for engine in engines:
            took = [each.seconds for each in engine.rounds]
            ratios = [base.seconds / each.seconds for base, each in zip(one.rounds, engine.rounds)]
            busy = [median([each.workers[w] for each in engine.rounds]) for w in range(len(engine.rounds[0].workers))]
            print(
                f"| {engine.name} | {median(took):.3f} | {min(took):.3f} to {max(took):.3f} | {median(ratios):.2f} | "
                f"{median([each.driver for each in engine.rounds]):.3f} | {', '.join(f'{s:.3f}' for s in busy) or '-'} "
                f"| {engine.first:.1f} | {one.alone / engine.alone:.2f} |"
            )
        same = [all(map(torch.equal, tree.leaves(engines[0].model), tree.leaves(e.model))) for e in engines]
        print("bits of all models:", "the same" if all(same) else f"differ: {same}")
    finally:
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
