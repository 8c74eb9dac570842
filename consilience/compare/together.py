"""Cells that train together: every run in a thread of its own, all clients' local work in one vectorised group."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from consilience.compare.cells import CellEnd
from consilience.compare.plan import Cell
from consilience.core.exchange import Broadcast
from consilience.core.protocols import Channel, ClientRule
from consilience.core.rounds import Diverged
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.data.dataset import Dataset
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.vectorised.joint import Joint, Request
from consilience.engines.workload import Workload
from consilience.experiments import runner
from consilience.experiments.live_run import Run
from consilience.runs.failures import explained
from consilience.runs.interrupts import Interrupts
from consilience.runs.observation import Observation
from consilience.runs.text import quality

_WAIT = 0.5  # seconds between two checks for signals

Notify = Callable[[Cell, int, str], None]


@dataclass(eq=False, kw_only=True)
class Barrier:
    """Runs wait here for each other: once every active run has a request, all requests are computed together."""

    runs: int
    requests: dict[int, Request] = field(default_factory=dict)
    answers: dict[int, Tree | Exception] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def ask(self, request: Request) -> Tree:
        """Wait for the others, then for the replies."""
        with self.changed:
            self.requests[request.run] = request
            self.changed.notify_all()
            while request.run not in self.answers:
                self.changed.wait()
            answer = self.answers.pop(request.run)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def leave(self, run: int) -> None:
        """This run makes no more requests."""
        with self.changed:
            self.left.add(run)
            self.changed.notify_all()

    def serve(self, joint: Joint) -> None:
        """Serve requests until all runs have left; called by the one thread that computes."""
        while True:
            with self.changed:
                while len(self.requests) + len(self.left) < self.runs:
                    self.changed.wait(timeout=_WAIT)  # a wait without a timeout would delay signals on some systems
                if not self.requests:
                    return
                asked = [self.requests.pop(run) for run in sorted(self.requests)]
            replies: Sequence[Tree | Exception]
            try:
                replies = joint.run_clients(asked)
            except Exception as problem:  # each run raises it as if it ran alone
                replies = [problem] * len(asked)
            with self.changed:
                self.answers |= {request.run: reply for request, reply in zip(asked, replies)}
                self.changed.notify_all()


def run_together(folder: Path, cells: Sequence[Cell], datas: Sequence[Dataset], notify: Notify) -> dict[str, CellEnd]:
    """Start these cells, and run them to their ends side by side; none of them has a folder yet."""
    barrier, ended = Barrier(runs=len(cells)), dict[str, CellEnd]()
    with contextlib.ExitStack() as stack, Interrupts() as interrupts:
        runs = [
            stack.enter_context(runner.start(cell.config, folder=folder / cell.name, data=data))
            for cell, data in zip(cells, datas)
        ]
        engines = [_vectorised(run) for run in runs]
        joint = Joint(
            engines,
            [tuple(sorted(run.experiment.prints.items())) for run in runs],
            [repr((run.config.model, run.config.loss, run.config.engine)) for run in runs],
        )
        threads = []
        for number, (run, cell) in enumerate(zip(runs, cells)):
            run.folder.record(comparison={"method": cell.method, "seed": cell.seed, "together": len(cells)})
            engines[number].delegate(functools.partial(_ask, barrier, number))
            watch = functools.partial(_watched, cell=cell, interrupts=interrupts, notify=notify)
            work = functools.partial(_complete, run, watch, cell, barrier, number, ended)
            threads.append(threading.Thread(target=work, name=cell.name, daemon=True))
        for thread in threads:
            thread.start()
        barrier.serve(joint)
        for thread in threads:
            thread.join()
    return ended


def _vectorised(run: Run) -> Vectorised:
    engine = run.experiment.engine
    if not isinstance(engine, Vectorised):
        raise Invalid(f"{type(engine).__name__} cannot train runs together: leave --together out, or use --jobs")
    return engine


def _ask(
    barrier: Barrier,
    run: int,
    client: ClientRule,
    channel: Channel,
    broadcast: Broadcast,
    workload: Workload,
    round: int,
    seed: int,
) -> Tree:
    return barrier.ask(Request(run, client, channel, broadcast, workload, round, seed))


def _watched(run: Run, *, cell: Cell, interrupts: Interrupts, notify: Notify) -> Iterator[Observation]:
    """The run's rounds; a signal, which only the main thread hears, ends it after the round in progress."""
    for observation in run.observations():
        notify(cell, observation.round.number, quality(observation.row, observation.metrics))
        yield observation
        if interrupts.asked and observation.round.number < run.config.rounds:
            run.stopped = interrupts.asked
            return


def _complete(
    run: Run,
    watch: Callable[[Run], Iterator[Observation]],
    cell: Cell,
    barrier: Barrier,
    number: int,
    ended: dict[str, CellEnd],
) -> None:
    try:
        found = run.complete(watch)
        last = quality(found.history[-1], found.task.metrics.rows) if found.history else "no round"
        status = "interrupted" if found.stopped else "finished"
        ended[cell.name] = CellEnd(status, last, found.stopped)
    except Diverged as problem:
        ended[cell.name] = CellEnd("diverged", f"diverged: {problem}")
    except Exception as problem:
        ended[cell.name] = CellEnd("failed", f"failed: {explained(problem)[0]}")
    finally:
        barrier.leave(number)
