"""The workers' processes: started, called, and replaced when one dies."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from consilience.core import tree
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.engines.ray import session
from consilience.engines.ray.transfer import WorkerReplies, packed
from consilience.engines.ray.worker import Worker, WorkerSetup
from consilience.engines.vectorised.tuning import LaneChoice
from consilience.engines.workload import Workload
from consilience.stores.client_rows import NOWHERE, ClientRows

FAILURES = 3  # deaths of one worker in one exchange after which its clients count as dropped
log = logging.getLogger(__name__)


class WorkerAssignment(NamedTuple):
    """What one worker is sent in an exchange."""

    rules: Any  # where the client rule and the channel lie
    shared: Any  # where the broadcast to all lies
    personal: Tree  # arrays: its own rows alone
    workload: Workload
    when: dict[str, int]  # round and seed

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the worker's methods take them."""
        return self.rules, self.shared, self.personal, self.workload


class WorkerResult(NamedTuple):
    """What one worker sent back of an exchange; shards and memories lie in the object store."""

    replies: WorkerReplies
    shards: list[Any]
    memories: list[Any]  # one per client, or none


class ActorPool:
    """One process per setup, each with its own clients; `memory` is what a new process needs of them."""

    def __init__(self, setups: Sequence[WorkerSetup], frozen: Tree, resources: Mapping[str, float]) -> None:
        import ray
        from ray import exceptions

        self._ray = ray
        self._dead = (
            exceptions.RayActorError,
            exceptions.WorkerCrashedError,
            exceptions.OutOfMemoryError,
            exceptions.NodeDiedError,
        )
        self._failed = exceptions.RayTaskError
        self._actor: Any = ray.remote(Worker).options(max_restarts=0, max_task_retries=0, **resources)
        self.ids = [setup.ids for setup in setups]
        # rows and frozen parameters are sent once, and outlive their worker
        self._setups: list[Any] = [ray.put(setup) for setup in setups]
        self._frozen: Any = ray.put(frozen)
        self.memory: ClientRows | None = None  # in an `ObjectStorage`
        self.choice: LaneChoice | None = None
        self._workers = [self._spawn(worker) for worker in range(len(setups))]
        self._check(exceptions.GetTimeoutError)

    def _check(self, too_late: type[Exception]) -> None:
        """Wait until all have started, and refuse those with another PyTorch version."""
        try:
            found = self._ray.get([worker.ready.remote() for worker in self._workers], timeout=session.START_SECONDS)
        except too_late as problem:
            raise Invalid(
                f"the {len(self._workers)} workers of engine = 'ray' were not ready after "
                f"{session.START_SECONDS} s: others use the cluster's cores or GPUs, so use fewer workers, or wait"
            ) from problem
        except self._dead as problem:
            raise Invalid(f"a worker of engine = 'ray' could not start: {problem}") from problem
        others = {version for _, version in found} - {str(torch.__version__)}
        if others:
            raise Invalid(
                f"workers have PyTorch {', '.join(sorted(others))} and this machine {torch.__version__}: install the "
                "same version everywhere"
            )

    def pids(self) -> list[int]:
        """The workers' process ids, on their machines."""
        return [pid for pid, _ in self._ray.get([worker.ready.remote() for worker in self._workers])]

    def measure_lanes(self, worker: int, assignment: WorkerAssignment) -> LaneChoice:
        """The lane that one worker finds fastest."""
        return self._retry(
            worker, lambda: self._workers[worker].measure_lanes.remote(*assignment.arguments, **assignment.when)
        )()

    def use_lane(self, choice: LaneChoice) -> None:
        """Set the lane of all workers, also of later ones."""
        self.choice = choice
        for worker in range(len(self._workers)):
            self._retry(worker, functools.partial(self._send_lane, worker))()

    def restore(self) -> None:
        """Give all workers the memories of their clients."""
        for worker in range(len(self._workers)):
            self._retry(worker, functools.partial(self._send_memories, worker))()

    def run_clients(self, assignments: Mapping[int, WorkerAssignment], remembers: bool) -> dict[int, WorkerResult]:
        """What came back, by worker; those whose processes died `FAILURES` times are missing."""
        sent = {worker: self._send(worker, assignment, remembers) for worker, assignment in assignments.items()}
        done: dict[int, WorkerResult] = {}
        for worker, assignment in assignments.items():
            for attempt in range(FAILURES):
                try:
                    replies, *rest = sent[worker]
                    shards = len(self._workers)
                    done[worker] = WorkerResult(self._get(replies), rest[:shards], rest[shards:])
                    break
                except self._dead as problem:
                    self._replace(worker, problem)
                    if attempt + 1 < FAILURES:
                        sent[worker] = self._send(worker, assignment, remembers)
        return done

    def begin_reduce(self, worker: int, arguments: tuple[Any, ...]) -> Callable[[], list[Any]]:
        """Start a worker's `reduce`; (), to wait for it."""
        return self._retry(worker, lambda: self._workers[worker].reduce.remote(*arguments))

    def shutdown(self) -> None:
        """End all processes, and Ray if nothing else uses it."""
        if self._ray.is_initialized():
            for worker in self._workers:
                self._ray.kill(worker)
        self._workers, self._setups, self._frozen, self.memory = [], [], None, None
        session.leave()

    def _send(self, worker: int, assignment: WorkerAssignment, remembers: bool) -> list[Any]:
        count = 1 + len(self._workers) + (len(assignment.workload.ids) if remembers else 0)
        call = self._workers[worker].run_clients.options(num_returns=count)
        return call.remote(*assignment.arguments, remembers, **assignment.when)

    def _retry(self, worker: int, start: Callable[[], Any]) -> Callable[[], Any]:
        """Start a call that must succeed; (), to wait for it, restarting it where a process dies."""
        first = start()

        def wait() -> Any:
            pending = first
            for attempt in range(FAILURES):
                try:
                    return self._get(pending)
                except self._dead as problem:
                    self._replace(worker, problem)
                    if attempt + 1 == FAILURES:
                        raise RuntimeError(
                            f"worker {worker} died {FAILURES} times doing the same: {problem}"
                        ) from problem
                    pending = start()
            raise AssertionError  # not reached

        return wait

    def _spawn(self, worker: int) -> Any:
        return self._actor.remote([path for path in sys.path if path], [self._setups[worker], self._frozen])

    def _replace(self, worker: int, problem: Exception) -> None:
        """A new process in place of one that died, with the same lane and memories."""
        log.warning("worker %d is replaced: %s", worker, str(problem).partition("\n")[0])
        self._ray.kill(self._workers[worker])  # it may only have been unreachable
        self._workers[worker] = self._spawn(worker)
        if self.choice is not None:
            self._send_lane(worker)
        self._send_memories(worker)

    def _send_lane(self, worker: int) -> Any:
        return self._workers[worker].use_lane.remote(self.choice)

    def _send_memories(self, worker: int) -> Any:
        """Give a worker the latest memories of its clients."""
        if self.memory is None:
            return self._workers[worker].restore.remote(None, self.ids[worker][:0], np.empty((0, 2), dtype=np.int64))
        slots = self.memory.slots(self.ids[worker])
        met = slots != NOWHERE
        storage: Any = self.memory.storage
        places, objects = storage.places(slots[met])
        first = packed(tree.repeat(self.memory.initial, 1))
        return self._workers[worker].restore.remote(first, self.ids[worker][met], places, *objects)

    def _get(self, pending: Any) -> Any:
        """What a call returns; an error in it as it was raised there."""
        try:
            return self._ray.get(pending)
        except self._failed as problem:
            cause = getattr(problem, "cause", None)
            raise (cause if isinstance(cause, Exception) else problem) from problem
