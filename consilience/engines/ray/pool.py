"""Shares of the clients, each served by a worker process, and reassigned when a process or its machine dies."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from consilience.core import tree
from consilience.core.tree import Tree
from consilience.engines.ray.processes import Process
from consilience.engines.ray.resources import WorkerResources, request
from consilience.engines.ray.serving import Serving
from consilience.engines.ray.transfer import WorkerReplies, packed
from consilience.engines.ray.worker import WorkerSetup
from consilience.engines.vectorised.tuning import LaneChoice
from consilience.engines.workload import Workload
from consilience.stores.client_rows import NOWHERE, ClientRows

FAILURES = 3  # deaths of the process of a share in one exchange after which its clients count as dropped
log = logging.getLogger(__name__)


class WorkerAssignment(NamedTuple):
    """The message to the worker of one share in an exchange."""

    rules: Any  # reference to the client rule and the channel
    shared: Any  # reference to the shared broadcast
    personal: Tree  # arrays: its own rows alone
    workload: Workload
    when: dict[str, int]  # round and seed

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the worker's methods take them."""
        return self.rules, self.shared, self.personal, self.workload


class WorkerResult(NamedTuple):
    """The results of one share in an exchange."""

    replies: WorkerReplies
    shards: list[Any]  # in the object store


class ActorPool:
    """One share per setup; each has a process of its own where there is room, else shares one with others.

    `memory` is the clients' memory. It is stored on the driver's machine, so that it survives the loss of workers.
    """

    def __init__(
        self,
        setups: Sequence[WorkerSetup],
        frozen: Tree,
        resources: WorkerResources,
        *,
        least: int | None = None,
    ) -> None:
        import ray
        from ray import exceptions

        self._ray, self._lost = ray, exceptions.ObjectLostError
        self._failed = exceptions.RayTaskError
        self.ids = [setup.ids for setup in setups]
        # rows and frozen parameters are sent once, and outlive their worker
        self._setups: list[Any] = [ray.put(setup) for setup in setups]
        self._frozen: Any = ray.put(frozen)
        self.memory: ClientRows | None = None  # in an `ObjectStorage`
        self.choice: LaneChoice | None = None
        self._here = ray.get_runtime_context().get_node_id()
        weights, machines = [setup.weight for setup in setups], [setup.machines for setup in setups]
        self.serving = Serving(weights, machines, resources, self._opened)
        self._dead = self.serving.processes.dead
        self._requested = least is not None
        if self._requested:  # what is missing at first joins between rounds
            request([resources.bundle] * len(setups))
        try:
            self.serving.begin(least or len(setups))
        except BaseException:
            self.shutdown()
            raise

    def pids(self) -> list[int]:
        """The process id of every share's worker, on its machine; 0 where it has none."""
        return [0 if process is None else process.pid for process in self.serving.by]

    def measure_lanes(self, share: int, assignment: WorkerAssignment) -> LaneChoice:
        """The lane that one worker finds fastest."""
        return self._retry(
            share, lambda: self._call(share, "measure_lanes", *assignment.arguments, **assignment.when)
        )()

    def use_lane(self, choice: LaneChoice) -> None:
        """Set the lane of all workers, also of later ones."""
        self.choice = choice
        for share in self.serving.served:
            self._retry(share, functools.partial(self._send_lane, share))()

    def restore(self) -> None:
        """Give all workers the memories of their clients."""
        for share in self.serving.served:
            self._retry(share, functools.partial(self._send_memories, share, self.memory))()

    def run_clients(self, assignments: Mapping[int, WorkerAssignment], remembers: bool) -> dict[int, WorkerResult]:
        """Results by share; shares without a process, or whose processes died `FAILURES` times, are missing."""
        sent = {share: self._send(share, assignments[share], remembers) for share in assignments}
        failures = dict.fromkeys(assignments, 0)
        done: dict[int, WorkerResult] = {}
        for share, assignment in assignments.items():
            while share not in done and failures[share] < FAILURES:
                process, pending = sent[share]
                if process is None:
                    break
                try:
                    done[share] = self._received(process, assignment.workload.ids, pending)
                except (*self._dead, self._lost) as problem:
                    self.serving.replace(process, problem)
                    for other in assignments:  # restart all of its assignments
                        if other not in done and sent[other][0] is process:
                            failures[other] += 1
                            if failures[other] < FAILURES:
                                sent[other] = self._send(other, assignments[other], remembers)
        return done

    def repeat(self, share: int, assignment: WorkerAssignment, remembers: bool, before: ClientRows | None) -> list[Any]:
        """The shards of an exchange that is over, from the memories clients had then; they keep those of now."""
        pending: list[Any] = []

        def start() -> Any:
            self._send_memories(share, before)
            pending[:] = self._send(share, assignment, remembers)[1]
            self._send_memories(share, self.memory)
            return pending[0]

        self.serving.refresh()
        if self.serving.by[share] is None:
            raise RuntimeError(f"the replies of {len(assignment.workload.ids)} clients were lost with their machine")
        log.warning("the replies of worker %d were lost with its machine: its clients repeat the round", share)
        self._retry(share, start)()
        return pending[1 : 1 + len(self._setups)]

    def begin_reduce(self, shard: int, arguments: Callable[[], tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Start a worker's `reduce`; returns a function that waits for it."""
        share = shard if self.serving.by[shard] is not None else self.serving.served[0]
        return self._retry(share, lambda: self._call(share, "reduce", *arguments()))

    def shutdown(self) -> None:
        """Stop all processes."""
        if self._ray.is_initialized():
            self.serving.processes.shutdown()
            if self._requested:
                request([])
        self._setups, self._frozen, self.memory = [], None, None

    def get(self, pending: Any) -> Any:
        """What a call returns; an error in it as it was raised there."""
        try:
            return self._ray.get(pending)
        except self._failed as problem:
            cause = getattr(problem, "cause", None)
            raise (cause if isinstance(cause, Exception) else problem) from problem

    def _call(self, share: int, method: str, *arguments: Any, returns: int = 1, **named: Any) -> Any:
        process = self.serving.by[share]
        assert process is not None
        return process.actor.call.options(num_returns=returns).remote(share, method, *arguments, **named)

    def _send(self, share: int, assignment: WorkerAssignment, remembers: bool) -> tuple[Process | None, list[Any]]:
        process = self.serving.by[share]
        if process is None:
            return None, []
        count = 1 + len(self._setups) + (len(assignment.workload.ids) if remembers else 0)
        call = self._call(share, "run_clients", *assignment.arguments, remembers, returns=count, **assignment.when)
        return process, call

    def _received(self, process: Process, ids: np.ndarray, pending: list[Any]) -> WorkerResult:
        """What a share sent back; its clients' memories are noted, copied to this machine if they lie elsewhere."""
        replies: WorkerReplies = self.get(pending[0])
        shards, memories = pending[1 : 1 + len(self._setups)], pending[1 + len(self._setups) :]
        if memories and self.memory is not None:
            if process.node != self._here:
                memories = [self._ray.put(value) for value in self._ray.get(memories)]
            self.memory = self.memory.write(ids, [(lying, 0) for lying in memories])
        return WorkerResult(replies, shards)

    def _retry(self, share: int, start: Callable[[], Any]) -> Callable[[], Any]:
        """Start a call that must succeed; returns a function that waits for it and restarts it if a process dies."""
        process, first = self.serving.by[share], start()

        def wait() -> Any:
            called, pending = process, first
            for attempt in range(FAILURES):
                try:
                    return self.get(pending)
                except self._dead as problem:
                    assert called is not None
                    self.serving.replace(called, problem)
                    called = self.serving.by[share]
                    if attempt + 1 == FAILURES or called is None:
                        raise RuntimeError(
                            f"worker {share} died {attempt + 1} times doing the same: {problem}"
                        ) from problem
                    pending = start()
            raise AssertionError  # not reached

        return wait

    def _opened(self, share: int, process: Process) -> None:
        """Send a process what it needs to serve a share: rows, the lane and the latest memories."""
        process.actor.open.remote(share, [self._setups[share], self._frozen])
        if self.choice is not None:
            self._send_lane(share)
        if self.memory is not None:
            self._send_memories(share, self.memory)

    def _send_lane(self, share: int) -> Any:
        return self._call(share, "use_lane", self.choice)

    def _send_memories(self, share: int, memory: ClientRows | None) -> Any:
        """Give a worker the memories of its clients."""
        ids = self.ids[share]
        if memory is None:
            return self._call(share, "restore", None, ids[:0], np.empty((0, 2), dtype=np.int64))
        slots = memory.slots(ids)
        met = slots != NOWHERE
        storage: Any = memory.storage
        places, objects = storage.places(slots[met])
        return self._call(share, "restore", packed(tree.repeat(memory.initial, 1)), ids[met], places, *objects)
