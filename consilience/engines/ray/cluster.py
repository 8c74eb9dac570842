"""Many processes, on one machine or several: clients are pinned to Ray workers, each a vectorised engine."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.federation import Federation, Rows
from consilience.core.plans import Split
from consilience.core.protocols import Channel, ClientRule
from consilience.core.settings import Count, Invalid, check_value
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.engines.placement import FloatingType, Placement
from consilience.engines.ray import session
from consilience.engines.ray.pool import ActorPool, WorkerAssignment, WorkerResult
from consilience.engines.ray.replies import ObjectStorage, RemoteReplies
from consilience.engines.ray.transfer import balanced_owners, packed, without_frozen
from consilience.engines.ray.worker import WorkerSetup
from consilience.engines.simulated import SimulatedEngine
from consilience.engines.vectorised import timing
from consilience.engines.vectorised.arithmetic import Precision, prepare_libraries
from consilience.engines.vectorised.local_work import on_device
from consilience.engines.vectorised.program import Program, memories
from consilience.engines.vectorised.tuning import LaneChoice, LaneName
from consilience.engines.workload import Workload, planned_steps
from consilience.environments.environment import Environment
from consilience.stores.client_rows import ClientRows

LARGEST = 2**62
LARGE = 4096  # bytes of a client's tensor from which on it stays in the object store


class RayCluster(SimulatedEngine):
    """Clients pinned to workers of Ray, balanced by rows; large replies stay with the workers until they are merged.

    `workers` processes with `threads` each, on this machine or at `address`; the other settings are those of each
    worker's `Vectorised` engine. Results do not depend on the number of workers where clients run one by one (lane
    "serial").
    """

    def __init__(
        self,
        task: Task,
        federation: Federation,
        *,
        environment: Environment | None = None,
        device: str = "auto",
        dtype: FloatingType = "float32",
        precision: Precision = "full",
        deterministic: bool = True,
        lane: LaneName = "auto",
        clients_at_once: Count | None = None,
        compile: bool | None = None,
        rounds_ahead: Count | None = None,
        memory: Literal["auto", "device", "host", "file"] = "auto",
        memory_folder: str | None = None,
        workers: Count = 2,
        threads: Count = 1,
        address: str | None = None,
    ) -> None:
        session.require_ray()
        workers, threads = check_value("workers", workers, Count), check_value("threads", threads, Count)
        with_rows = int((federation.train.sizes > 0).sum())
        if workers > with_rows:
            raise Invalid(f"workers = {workers} is more than the {with_rows} clients that have rows: use fewer")
        super().__init__(task, federation, environment, Placement.of(device, dtype))
        prepare_libraries(self.device, precision, deterministic)
        self.environment.check_against(len(federation))
        self.choice = LaneChoice(lane=lane, clients_at_once=clients_at_once, compile=compile)
        self._given_task = task
        self._test = None if federation.test is None else self._placement.rows(federation.test)
        self.owner = balanced_owners(self.sizes.astype(np.float64), workers)  # [K] worker of each client
        self._workers, self._threads, self._address = workers, threads, address
        self._settings = {
            "environment": environment,
            "device": self.device.type,  # Ray shows each worker only the GPU it may use
            "dtype": dtype,
            "precision": precision,
            "deterministic": deterministic,
            "lane": lane,
            "clients_at_once": clients_at_once,
            "compile": compile,
            "rounds_ahead": rounds_ahead,
            "memory": memory,
            "memory_folder": memory_folder,
        }
        self._pool: ActorPool | None = None
        self._lane_is_chosen = False
        self._exchanges = 0
        self._rules: dict[tuple[ClientRule, Channel], _Rules] = {}
        self._shared: tuple[Tree | None, Any] = (None, None)  # what was last sent to all, and where it lies

    @property
    def test_rows(self) -> Rows | None:
        """The test rows on the driver's device."""
        return self._test

    @property
    def resolved_settings(self) -> dict[str, Any]:
        """The device, and what is known of the lane, which one worker measures for all."""
        return {"device": str(self.device), **self.choice.resolved}

    def store(self, rows: Split) -> Rows:
        """The rows on the driver's device, for what does not run on the workers."""
        if rows == "train":
            return self._placement.rows(self.federation.train)
        if self._test is None:
            raise Invalid("the federation has no test rows: pass test=... when building it")
        return self._test

    @torch.no_grad()
    def seconds(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, ids: np.ndarray, *, round: int, seed: int
    ) -> np.ndarray:
        """[m] simulated seconds until each reply arrives."""
        sizes = self._sizes(client)[ids]
        steps = planned_steps(self.environment, client.work, ids, sizes, round, seed)
        known = self._about(client, channel)
        return timing.seconds(
            self.environment, known.program, broadcast, known.memory, ids, sizes, steps, round=round, seed=seed
        )

    @torch.no_grad()
    def exchange(
        self,
        client: ClientRule,
        channel: Channel,
        broadcast: Broadcast,
        ids: np.ndarray,
        *,
        round: int,
        seed: int,
    ) -> Cohort:
        """Send, run the workers' clients, collect what arrives, in client order."""
        sizes = self._sizes(client)[ids]
        workload = Workload.of(self.environment, client.work, ids, sizes, round=round, seed=seed)
        if not len(workload.ids):
            return self._cohort(workload, {}, round)
        pool = self._spawned()
        remembers = self._remembers(pool, client, channel)
        assignments = self._assignments(client, channel, broadcast, workload, {"round": round, "seed": seed})
        if client.work.trains and not self._lane_is_chosen:
            self._choose_lane(pool, assignments)
        done = pool.run_clients(assignments, remembers)
        lost = np.isin(self.owner[workload.ids], [worker for worker in assignments if worker not in done])
        if lost.any():
            counts = {**workload.counts, "worker_lost": int(lost.sum())}
            workload = workload.only(~lost)._replace(counts=counts)
        return self._cohort(workload, self._collected(pool, assignments, done) if done else {}, round)

    def recall(self) -> Tree:
        """Every client's memory, stacked [K, ...], fetched when something reads it; later rounds do not change it."""
        return {} if self._pool is None or self._pool.memory is None else self._pool.memory.tree()

    def restore(self, memory: Tree) -> None:
        """Restore saved memories; {} clears all."""
        something = any(True for _ in tree.leaves(memory))
        if not something and self._pool is None:
            return
        pool = self._spawned()
        pool.memory = self._stored(memory) if something else None
        pool.restore()

    def close(self) -> None:
        """End the workers, and Ray if it was started here."""
        if self._pool is not None:
            self._shared = (None, None)
            self._rules.clear()
            self._shutdown()
            self._pool = None

    def _spawned(self) -> ActorPool:
        """The workers, which start when they are first needed."""
        if self._pool is None:
            count = self._workers
            session.join(self._address, count * self._threads)
            try:
                module, frozen = without_frozen(self._given_task.module)
                self._pool = ActorPool(
                    [self._setup(np.flatnonzero(self.owner == worker), module) for worker in range(count)],
                    frozen,
                    session.room(count, self._threads, self.device.type == "cuda"),
                )
            except BaseException:
                session.leave()
                raise
            self._shutdown = weakref.finalize(self, ActorPool.shutdown, self._pool)
        return self._pool

    def _setup(self, ids: np.ndarray, module: nn.Module) -> WorkerSetup:
        return WorkerSetup.of(
            self.federation,
            ids,
            self._given_task,
            module,
            self._settings,
            threads=self._threads,
            shards=self._workers,
            large=LARGE,
        )

    def _assignments(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, workload: Workload, when: dict[str, int]
    ) -> dict[int, WorkerAssignment]:
        """What each worker that has something to do is sent."""
        import ray

        if self._shared[0] is not broadcast.shared:
            self._shared = (broadcast.shared, ray.put(packed(broadcast.shared)))
        rules = self._about(client, channel).stored
        assignments = {}
        for worker in np.unique(self.owner[workload.ids]).tolist():
            mine = workload.only(self.owner[workload.ids] == worker)
            personal = tree.take(broadcast.personal, mine.place)
            renumbered = mine._replace(place=np.arange(len(mine.ids)))
            assignments[worker] = WorkerAssignment(rules, self._shared[1], packed(personal), renumbered, when)
        return assignments

    def _choose_lane(self, pool: ActorPool, assignments: dict[int, WorkerAssignment]) -> None:
        """One worker measures the lanes on its clients; all take the one it chose."""
        busiest = max(assignments, key=lambda worker: (int(assignments[worker].workload.steps.sum()), -worker))
        choice = pool.measure_lanes(busiest, assignments[busiest])
        if self.choice.clients_at_once is None and choice.clients_at_once is not None:
            # it measured all the memory, which it shares with the others
            choice = replace(choice, clients_at_once=max(1, choice.clients_at_once // self._workers))
        self.choice = choice
        pool.use_lane(choice)
        self._lane_is_chosen = True

    def _collected(
        self, pool: ActorPool, assignments: dict[int, WorkerAssignment], done: dict[int, WorkerResult]
    ) -> Tree:
        """The replies in client order, large tensors where they are; memories are noted."""
        found = list(done.values())
        if pool.memory is not None:
            for worker, each in done.items():
                if each.memories:
                    held = [(lying, 0) for lying in each.memories]
                    pool.memory = pool.memory.write(assignments[worker].workload.ids, held)
        fewest = min(each.replies.choice.clients_at_once or LARGEST for each in found)
        if self._lane_is_chosen and fewest < (self.choice.clients_at_once or 0):  # memory ran out somewhere
            pool.choice = self.choice = replace(self.choice, clients_at_once=fewest)
        self._exchanges += 1
        return RemoteReplies(
            self._exchanges,
            [each.replies for each in found],
            [assignments[worker].workload.ids for worker in done],
            [each.shards for each in found],
            self.device,
            pool.begin_reduce,
        ).tree

    def _cohort(self, workload: Workload, reply: Tree, round: int) -> Cohort:
        return workload.cohort(reply, on_device(workload.sizes.astype(np.float64), self.device), round)

    def _sizes(self, client: ClientRule) -> np.ndarray:
        """[K] rows of every client that a rule reads."""
        return self.sizes if client.work.rows == "train" else self.store("test").sizes.numpy()

    def _about(self, client: ClientRule, channel: Channel) -> _Rules:
        known = self._rules.get((client, channel))
        if known is None:
            start = self.start()
            memory = tree.repeat(memories(client.init(start), channel.init(start)), 1)
            program = Program(client, channel, self._task, self.dtype, self.device, False)
            known = self._rules[client, channel] = _Rules(program, memory)
        return known

    def _remembers(self, pool: ActorPool, client: ClientRule, channel: Channel) -> bool:
        """Whether clients have memory after this exchange; the first time, all start with the rule's initial memory."""
        if not client.work.trains:
            return False
        if pool.memory is None:
            template = self._about(client, channel).memory
            if any(True for _ in tree.leaves(template)):
                pool.memory = ClientRows(ObjectStorage(template, self.device), len(self.sizes))
        return pool.memory is not None

    def _stored(self, memory: Tree) -> ClientRows:
        """Saved memories, in the object store."""
        known = ClientRows.of(memory)
        if known is None:
            first = tree.to(tree.take(memory, np.zeros(1, dtype=np.int64)), self.device)
            return ClientRows.dense(memory, ObjectStorage(first, self.device))
        if isinstance(known.storage, ObjectStorage):
            return known
        initial = tree.shaped_like(memory, tree.flatten(known.initial))  # with its empty subtrees
        return known.copied(ObjectStorage(tree.to(tree.repeat(initial, 1), self.device), self.device))


class _Rules:
    """A client rule and a channel: a program to predict replies, the initial memory, and where workers find them."""

    def __init__(self, program: Program, memory: Tree) -> None:
        self.program, self.memory = program, memory  # memory: [1, ...]
        self._stored: Any = None

    @property
    def stored(self) -> Any:
        """Where both lie in the object store."""
        if self._stored is None:
            import ray

            self._stored = ray.put((self.program.rule, self.program.channel))
        return self._stored
