"""Many processes, on one machine or several: clients are pinned to Ray workers, each a vectorised engine."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import torch

from consilience.core import tree
from consilience.core.client_flags import AllBut
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.federation import Federation, Rows
from consilience.core.plans import Split
from consilience.core.protocols import Channel, ClientRule
from consilience.core.settings import Count, Invalid, NonNegative, Positive, check_value
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.engines.placement import FloatingType, Placement
from consilience.engines.ray import session
from consilience.engines.ray.node_data import NodeFederation
from consilience.engines.ray.pool import ActorPool, WorkerAssignment, WorkerResult
from consilience.engines.ray.replies import ObjectStorage, RemoteReplies
from consilience.engines.ray.resources import Placing, asked_resources, parsed_resources
from consilience.engines.ray.rules import KnownRules
from consilience.engines.ray.transfer import balanced_owners, packed, without_frozen
from consilience.engines.ray.worker import WorkerSetup
from consilience.engines.simulated import SimulatedEngine
from consilience.engines.vectorised import timing
from consilience.engines.vectorised.arithmetic import Precision, prepare_libraries, resolve_precision
from consilience.engines.vectorised.tuning import LaneChoice, LaneName
from consilience.engines.workload import Workload, planned_steps
from consilience.environments.environment import Environment
from consilience.stores.client_rows import ClientRows

LARGEST = 2**62
LARGE = 4096  # bytes: larger client tensors stay in the object store


class RayCluster(SimulatedEngine):
    """Clients pinned to workers of Ray, balanced by rows; large replies stay with the workers until they are merged.

    `workers` processes with `threads` each, on this machine or at `address`; the other settings are those of each
    worker's `Vectorised` engine. Results do not depend on the number of workers where clients run one by one (lane
    "serial").
    """

    def __init__(
        self,
        task: Task,
        federation: Federation | NodeFederation,
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
        min_workers: Count | None = None,
        threads: Count = 1,
        num_cpus: Positive | None = None,
        num_gpus: NonNegative | None = None,
        resources: tuple[str, ...] | None = None,
        placement: Placing | None = None,
        address: str | None = None,
    ) -> None:
        session.require_ray()
        workers, threads = check_value("workers", workers, Count), check_value("threads", threads, Count)
        check_value("num_cpus", num_cpus, Positive | None), check_value("num_gpus", num_gpus, NonNegative | None)
        parsed_resources(resources or ())
        if min_workers is not None and not 1 <= min_workers <= workers:
            raise Invalid(f"min_workers = {min_workers} must be from 1 to workers = {workers}")
        with_rows = int((federation.train.sizes > 0).sum())
        if workers > with_rows:
            raise Invalid(f"workers = {workers} is more than the {with_rows} clients that have rows: use fewer")
        self._nodes = federation if isinstance(federation, NodeFederation) else None
        super().__init__(task, cast(Federation, federation), environment, Placement.of(device, dtype))
        self.precision = resolve_precision(precision, self.device, self.dtype)
        prepare_libraries(self.device, deterministic)
        self.environment.check_against(len(federation))
        self.choice = LaneChoice(lane=lane, clients_at_once=clients_at_once, compile=compile)
        self._given_task = task
        self._test: Rows | None = None
        self._machines: Sequence[frozenset[str] | None] = [None] * workers  # that have its clients' rows
        if isinstance(federation, NodeFederation):
            self.owner, self._machines = federation.shares(workers)  # [K] worker of each client
        else:
            self._test = None if federation.test is None else self._placement.rows(federation.test)
            self.owner = balanced_owners(self.sizes.astype(np.float64), workers)
        self._workers, self._least, self._threads, self._address = workers, min_workers, threads, address
        self._asked: dict[str, Any] = {"cpus": num_cpus or threads, "gpus": num_gpus, "custom": resources or ()}
        self._asked["placing"] = check_value("placement", placement or "spread", Placing)
        self._settings = {
            "environment": environment,
            "device": worker_device(self.device, num_gpus),  # Ray exposes only the assigned GPU to each worker
            "dtype": dtype,
            "precision": self.precision,
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
        self._rules = KnownRules(self._task, self._placement)
        self._shared: tuple[Tree | None, Any] = (None, None)  # last shared broadcast, and its reference

    @property
    def test_rows(self) -> Rows | None:
        """The test rows on the driver's device."""
        return self._test

    @property
    def resolved_settings(self) -> dict[str, Any]:
        """The device, the precision, and what is known of the lane, which one worker measures for all."""
        return {"device": str(self.device), "precision": self.precision, **self.choice.resolved}

    def store(self, rows: Split) -> Rows:
        """The rows on the driver's device, for work that does not run on the workers."""
        if self._nodes is not None:
            raise Invalid(f"the {rows} rows lie on the machines of the cluster and are not read here: clients use them")
        if rows == "train":
            return self._placement.rows(self.federation.train)
        if self._test is None:
            raise Invalid("the federation has no test rows: pass test=... when building it")
        return self._test

    def available(self, round: int, seed: int) -> np.ndarray | AllBut:
        """[K] available clients, without those whose rows are on no machine of the cluster at present."""
        known = super().available(round, seed)
        if self._pool is None or not self._pool.serving.unserved:
            return known
        serving = self._pool.serving
        if self._nodes is not None and self._nodes.look_again():
            serving.machines = [*self._nodes.having(self.owner, self._workers)]
        serving.refresh()
        away = np.flatnonzero(np.isin(self.owner, serving.unserved))
        return known.without(away) if isinstance(known, AllBut) else known & AllBut(len(known), away).dense()

    @torch.no_grad()
    def seconds(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, ids: np.ndarray, *, round: int, seed: int
    ) -> np.ndarray:
        """[m] simulated seconds until each reply arrives."""
        sizes = self._sizes(client)[ids]
        steps = planned_steps(self.environment, client.work, ids, sizes, round, seed)
        known = self._rules.about(client, channel)
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
        """Send the broadcast, run the clients on the workers, collect the replies in client order."""
        sizes = self._sizes(client)[ids]
        workload = Workload.of(self.environment, client.work, ids, sizes, round=round, seed=seed)
        if not len(workload.ids):
            return workload.cohort({}, round, self.device)
        pool = self._spawned()
        pool.serving.refresh()
        remembers = self._remembers(pool, client, channel)
        assignments = self._assignments(client, channel, broadcast, workload, {"round": round, "seed": seed})
        if client.work.trains and not self._lane_is_chosen:
            self._choose_lane(pool, assignments)
        before = pool.memory
        done = pool.run_clients(assignments, remembers)
        lost = np.isin(self.owner[workload.ids], [share for share in assignments if share not in done])
        if lost.any():
            counts = {**workload.counts, "worker_lost": int(lost.sum())}
            workload = workload.only(~lost)._replace(counts=counts)
        if not done:
            return workload.cohort({}, round, self.device)

        def repeat(place: int) -> list[Any]:
            share = list(done)[place]
            return pool.repeat(share, assignments[share], remembers, before)

        return workload.cohort(self._collected(pool, assignments, done, repeat), round, self.device)

    def recall(self) -> Tree:
        """Every client's memory, stacked [K, ...], fetched when something reads it; later rounds do not change it."""
        return {} if self._pool is None or self._pool.memory is None else self._pool.memory.tree()

    def restore(self, memory: Tree) -> None:
        """Restore saved memories; {} clears all."""
        something = any(True for _ in tree.leaves(memory))
        if not something and self._pool is None:
            return
        pool = self._spawned()
        pool.memory = ObjectStorage.table(memory, self.device) if something else None
        pool.restore()

    def close(self) -> None:
        """Stop the workers, and Ray if it was started here."""
        if self._pool is not None:
            self._shared = (None, None)
            self._rules = KnownRules(self._task, self._placement)  # its stored objects are gone
            self._shutdown()
            self._pool = None

    def _spawned(self) -> ActorPool:
        """The workers, started at first use."""
        if self._pool is None:
            session.join(self._address, math.ceil(self._workers * self._asked["cpus"]))
            try:
                self._pool = self._started()
            except BaseException:
                session.leave()
                raise
            self._shutdown = weakref.finalize(self, _end, self._pool)
        return self._pool

    def _started(self) -> ActorPool:
        machines = list(session.machines().values())
        resources = asked_resources(
            **self._asked,
            on_gpu=self._settings["device"] == "cuda",
            workers=self._workers,
            devices=sum(machine.get("GPU", 0.0) for machine in machines),
        )
        if self._least is None:  # else machines may still join
            resources.refuse_too_few(machines, self._workers)
        module, frozen = without_frozen(self._given_task.module)
        setup = functools.partial(
            WorkerSetup.of,
            self._nodes or self.federation,
            self._given_task,
            module,
            self._settings,
            threads=self._threads,
            shards=self._workers,
            large=LARGE,
        )
        setups = [setup(np.flatnonzero(self.owner == worker), where) for worker, where in enumerate(self._machines)]
        return ActorPool(setups, frozen, resources, least=self._least)

    def _assignments(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, workload: Workload, when: dict[str, int]
    ) -> dict[int, WorkerAssignment]:
        """What each worker that has something to do is sent."""
        import ray

        if self._shared[0] is not broadcast.shared:
            self._shared = (broadcast.shared, ray.put(packed(broadcast.shared)))
        rules = self._rules.about(client, channel).stored
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
        self,
        pool: ActorPool,
        assignments: dict[int, WorkerAssignment],
        done: dict[int, WorkerResult],
        repeat: Callable[[int], list[Any]],
    ) -> Tree:
        """The replies in client order; large tensors stay on the workers."""
        found = list(done.values())
        fewest = min(each.replies.choice.clients_at_once or LARGEST for each in found)
        if self._lane_is_chosen and fewest < (self.choice.clients_at_once or 0):  # memory ran out somewhere
            pool.choice = self.choice = replace(self.choice, clients_at_once=fewest)
        self._exchanges += 1
        return RemoteReplies(
            self._exchanges,
            [each.replies for each in found],
            [assignments[share].workload.ids for share in done],
            [each.shards for each in found],
            self.device,
            pool.begin_reduce,
            repeat,
        ).tree

    def _sizes(self, client: ClientRule) -> np.ndarray:
        """[K] rows of every client that a rule reads."""
        if client.work.rows == "train":
            return self.sizes
        if self.test_sizes is None:
            raise Invalid("the federation has no test rows: pass test=... when building it")
        return self.test_sizes

    def _remembers(self, pool: ActorPool, client: ClientRule, channel: Channel) -> bool:
        """Whether clients have memory after this exchange; the first time, all start with the rule's initial memory."""
        if not client.work.trains:
            return False
        if pool.memory is None:
            template = self._rules.about(client, channel).memory
            if any(True for _ in tree.leaves(template)):
                pool.memory = ClientRows(ObjectStorage(template, self.device), len(self.sizes))
        return pool.memory is not None


def worker_device(driver: torch.device, num_gpus: float | None) -> str:
    """Where workers compute: on GPUs if they are given any, on processors if they are given 0, else as the driver."""
    return driver.type if num_gpus is None else "cuda" if num_gpus else "cpu"


def _end(pool: ActorPool) -> None:
    pool.shutdown()
    session.leave()
