"""Many processes, on one machine or several: clients are pinned to Ray workers, each a vectorised engine."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort, WaitPolicy
from consilience.core.federation import Federation, Rows
from consilience.core.protocols import Channel, ClientRule
from consilience.core.settings import Count, Invalid, check_value
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.engines.ray import session
from consilience.engines.ray.pool import ActorPool, Assignment, Done
from consilience.engines.ray.replies import Memories, Replies
from consilience.engines.ray.transfer import packed, shared_out
from consilience.engines.ray.worker import Share
from consilience.engines.vectorised import timing
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.vectorised.orders import Orders, planned_steps
from consilience.engines.vectorised.program import Program, memories
from consilience.engines.vectorised.tuning import Choice
from consilience.environments.environment import Environment

LARGEST = 2**62
LARGE = 4096  # bytes of a client's tensor from which on it stays in the object store


class RayCluster:
    """Clients pinned to workers of Ray, balanced by rows; large replies stay with the workers until they are merged.

    `workers` processes with `threads` each, on this machine or at `address`; everything else is said to each worker's
    vectorised engine. Results do not depend on the number of workers where clients run one by one (lane "serial").
    """

    def __init__(
        self,
        task: Task,
        federation: Federation,
        *,
        environment: Environment | None = None,
        rounds_ahead: Count | None = None,
        workers: Count = 2,
        threads: Count = 1,
        address: str | None = None,
        **each: Any,
    ) -> None:
        session.require_ray()
        workers, threads = check_value("workers", workers, Count), check_value("threads", threads, Count)
        with_rows = int((federation.train.sizes > 0).sum())
        if workers > with_rows:
            raise Invalid(f"workers = {workers} is more than the {with_rows} clients that have rows: use fewer")
        self.federation, self._source = federation, task
        self._here = Vectorised(
            task, _without_rows(federation), environment=environment, rounds_ahead=rounds_ahead, **each
        )
        self.device, self.dtype, self.environment = self._here.device, self._here.dtype, self._here.environment
        self.owner = shared_out(federation.train.sizes.numpy().astype(np.float64), workers)  # [K] worker of each client
        self._workers, self._threads, self._address = workers, threads, address
        self._settings = {**each, "environment": environment, "rounds_ahead": rounds_ahead}
        self._settings["device"] = self.device.type  # Ray shows each worker only the GPU it may use
        self._pool: ActorPool | None = None
        self._settled = False
        self._exchanges = 0
        self._known: dict[tuple[ClientRule, Channel], _Known] = {}
        self._shared: tuple[Tree | None, Any] = (None, None)  # what was last sent to all, and where it lies

    @property
    def task(self) -> Task:
        """The task, with its constants on the driver's device."""
        return self._here.task

    @property
    def sizes(self) -> np.ndarray:
        """[K] training rows of every client."""
        return self._here.sizes

    @property
    def choice(self) -> Choice:
        """The lane that was asked for, or measured to be fastest by one worker for all."""
        return self._here.choice

    def store(self, rows: Literal["train", "test"]) -> Rows:
        """The rows on the driver's device."""
        return self.federation.train.to(self.device, self.dtype) if rows == "train" else self._here.store(rows)

    def start(self) -> Tree:
        """The task's initial model, on the driver's device."""
        return self._here.start()

    def available(self, round: int, seed: int) -> np.ndarray:
        """[K] who could take part."""
        return self._here.available(round, seed)

    def planned(self, client: ClientRule, ids: np.ndarray, *, round: int, seed: int) -> np.ndarray:
        """[m] steps that clients will do in a round's exchange; 0 for those who will not be heard."""
        return self._here.planned(client, ids, round=round, seed=seed)

    @property
    def wait_policy(self) -> WaitPolicy:
        """How long the server waits for replies, in simulated time."""
        return self._here.wait_policy

    @torch.no_grad()
    def seconds(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, ids: np.ndarray, *, round: int, seed: int
    ) -> np.ndarray:
        """[m] simulated seconds until each reply is there."""
        sizes = self._sizes(client.work.rows)[ids]
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
        """Send, let the workers' clients work, collect what arrives, in client order."""
        orders = Orders.given(
            self.environment, client.work, ids, self._sizes(client.work.rows)[ids], round=round, seed=seed
        )
        if not len(orders.ids):
            return self._cohort(orders, {}, round)
        pool = self._spawned()
        remembers = self._remembers(pool, client, channel)
        assignments = self._assignments(client, channel, broadcast, orders, {"round": round, "seed": seed})
        if client.work.trains and not self._settled:
            self._settle(pool, assignments)
        done = pool.fulfil(assignments, remembers)
        lost = np.isin(self.owner[orders.ids], [worker for worker in assignments if worker not in done])
        if lost.any():
            orders = orders.of(~lost)._replace(counts={**orders.counts, "worker_lost": int(lost.sum())})
        return self._cohort(orders, self._collected(pool, assignments, done) if done else {}, round)

    def recall(self) -> Tree:
        """Every client's memory, stacked [K, ...], fetched when something reads it; later rounds do not change it."""
        return {} if self._pool is None or self._pool.memory is None else self._pool.memory.recall()

    def restore(self, memory: Tree) -> None:
        """Put saved memories back; {} forgets all."""
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
            self._known.clear()
            self._dismiss()
            self._pool = None

    def _spawned(self) -> ActorPool:
        """The workers, who start when they are first needed."""
        if self._pool is None:
            count = self._workers
            session.join(self._address, count * self._threads)
            try:
                self._pool = ActorPool(
                    [self._share(np.flatnonzero(self.owner == worker)) for worker in range(count)],
                    session.room(count, self._threads, self.device.type == "cuda"),
                )
            except BaseException:
                session.leave()
                raise
            self._dismiss = weakref.finalize(self, ActorPool.dismiss, self._pool)
        return self._pool

    def _share(self, ids: np.ndarray) -> Share:
        return Share.of(
            self.federation,
            ids,
            self._source,
            self._settings,
            threads=self._threads,
            shards=self._workers,
            large=LARGE,
        )

    def _assignments(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, orders: Orders, when: dict[str, int]
    ) -> dict[int, Assignment]:
        """What each worker that has something to do is sent."""
        import ray

        if self._shared[0] is not broadcast.shared:
            self._shared = (broadcast.shared, ray.put(packed(broadcast.shared)))
        rules = self._about(client, channel).rules
        assignments = {}
        for worker in np.unique(self.owner[orders.ids]).tolist():
            mine = orders.of(self.owner[orders.ids] == worker)
            personal = tree.take(broadcast.personal, mine.place)
            renumbered = mine._replace(place=np.arange(len(mine.ids)))
            assignments[worker] = Assignment(rules, self._shared[1], packed(personal), renumbered, when)
        return assignments

    def _settle(self, pool: ActorPool, assignments: dict[int, Assignment]) -> None:
        """One worker measures the lanes on its share; all take the one it chose."""
        busiest = max(assignments, key=lambda worker: (int(assignments[worker].orders.steps.sum()), -worker))
        choice = pool.settle(busiest, assignments[busiest])
        if self._settings.get("clients_at_once") is None and choice.clients_at_once is not None:
            # it saw all the memory that it shares with the others
            choice = replace(choice, clients_at_once=max(1, choice.clients_at_once // self._workers))
        self._here.adopt(choice)
        pool.adopt(choice)
        self._settled = True

    def _collected(self, pool: ActorPool, assignments: dict[int, Assignment], done: dict[int, Done]) -> Tree:
        """The replies in client order, large tensors where they are; memories are noted."""
        found = list(done.values())
        if pool.memory is not None:
            for worker, each in done.items():
                if each.memories:
                    pool.memory.keep(assignments[worker].orders.ids, each.memories)
        fewest = min(each.report.choice.clients_at_once or LARGEST for each in found)
        if self._settled and fewest < (self.choice.clients_at_once or 0):  # memory ran out somewhere
            pool.choice = replace(self.choice, clients_at_once=fewest)
            self._here.adopt(pool.choice)
        self._exchanges += 1
        return Replies(
            self._exchanges,
            [each.report for each in found],
            [assignments[worker].orders.ids for worker in done],
            [each.shards for each in found],
            self.device,
            pool.begin_reduce,
        ).tree

    def _cohort(self, orders: Orders, reply: Tree, round: int) -> Cohort:
        examples = torch.from_numpy(orders.sizes.astype(np.float64)).to(self.device)
        return orders.cohort(reply, examples, round)

    def _sizes(self, rows: Literal["train", "test"]) -> np.ndarray:
        return self.sizes if rows == "train" else self._here.store(rows).sizes.numpy()

    def _about(self, client: ClientRule, channel: Channel) -> _Known:
        known = self._known.get((client, channel))
        if known is None:
            start = self.start()
            memory = tree.repeat(memories(client.init(start), channel.init(start)), 1)
            program = Program(client, channel, self.task, self.dtype, self.device, False)
            known = self._known[client, channel] = _Known(program, memory)
        return known

    def _remembers(self, pool: ActorPool, client: ClientRule, channel: Channel) -> bool:
        """Whether clients keep something of this exchange; the first time, all begin with the rule's own beginning."""
        if not client.work.trains:
            return False
        if pool.memory is None:
            import ray

            template = self._about(client, channel).memory
            if any(True for _ in tree.leaves(template)):
                clients = len(self.federation)
                objects = [ray.put(packed(template))] * clients
                pool.memory = Memories(template, objects, np.zeros(clients, dtype=np.int64), self.device)
        return pool.memory is not None

    def _stored(self, memory: Tree) -> Memories:
        """Saved memories, in the object store."""
        import ray

        objects: list[Any] = [None] * len(self.federation)
        rows = np.zeros(len(self.federation), dtype=np.int64)
        for worker in range(self._workers):
            ids = np.flatnonzero(self.owner == worker)
            lying = ray.put(packed(tree.take(memory, ids)))
            rows[ids] = np.arange(len(ids))
            for client in ids.tolist():
                objects[client] = lying
        return Memories(tree.here(tree.take(memory, np.zeros(1, dtype=np.int64))), objects, rows, self.device)


class _Known:
    """A client rule and a channel: a program to foretell their replies, a first memory, and where workers find them."""

    def __init__(self, program: Program, memory: Tree) -> None:
        self.program, self.memory = program, memory  # memory: [1, ...]
        self._rules: Any = None

    @property
    def rules(self) -> Any:
        """Where both lie in the object store."""
        if self._rules is None:
            import ray

            self._rules = ray.put((self.program.rule, self.program.channel))
        return self._rules


def _without_rows(federation: Federation) -> Federation:
    """The clients by name and size, with one training row between them: the others are with the workers."""
    train = federation.train
    kept = Rows(x=tree.rows(train.x, slice(0, 1)), y=train.y[:1], starts=train.starts, sizes=train.sizes)
    return Federation(train=kept, test=federation.test, names=federation.names, classes=federation.classes)
