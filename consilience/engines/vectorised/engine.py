"""One process, one device: the whole cohort trains at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core import plans, rng, tree
from consilience.core.exchange import Broadcast, Cohort, WaitPolicy
from consilience.core.federation import Federation, Rows
from consilience.core.protocols import Channel, ClientRule
from consilience.core.settings import Count, Invalid, nearest
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.engines.vectorised import timing
from consilience.engines.vectorised.arithmetic import Arithmetic
from consilience.engines.vectorised.orders import Orders, planned_steps
from consilience.engines.vectorised.program import Context, Program, memories
from consilience.engines.vectorised.tuning import Choice, LaneName, Tuner
from consilience.environments import clock
from consilience.environments.environment import Environment

DTYPES = {"float32": torch.float32, "float64": torch.float64}
PRECISIONS = ("full", "tf32", "bf16")


class Vectorised:
    """Data, client memories and models stay on the device; the cohort is cut into groups that fit and run in a lane.

        engine = cs.Vectorised(cs.Task(module), federation, lane="batched")
        for done in cs.run(cs.fedavg(lr=0.1), engine, rounds=10):
            print(done.number, done.cohort.ids)

    environment: who is slow, away or silent; by default nobody.
    device: "auto" (the GPU if there is one), "cpu", "cuda" or "cuda:1".
    dtype, precision: "float32" or "float64"; "full", "tf32" or "bf16" arithmetic. deterministic: no kernels that may
    give other bits next time.
    lane: "batched" (one vmapped step for all; "batched-matmul": with convolutions as matrix products), "streams"
    (clients side by side: CUDA graphs, or one per CPU core), "serial", or "auto", which measures them on the first
    round. `choice` says which was taken.
    clients_at_once: the largest group; by default what fits into memory.
    compile, rounds_ahead: whether to compile (CUDA only); by default if it pays for itself in the rounds ahead. On a
    CPU, batching is only tried if there are enough of them.
    hosts: the federation holds only these clients of a larger one, in ascending order (an engine that spreads its
    clients gives each of several such engines its own, and calls `fulfil`).
    """

    def __init__(
        self,
        task: Task,
        federation: Federation,
        *,
        environment: Environment | None = None,
        device: str = "auto",
        dtype: Literal["float32", "float64"] = "float32",
        precision: Literal["full", "tf32", "bf16"] = "full",
        deterministic: bool = True,
        lane: LaneName = "auto",
        clients_at_once: Count | None = None,
        compile: bool | None = None,
        rounds_ahead: Count | None = None,
        hosts: np.ndarray | None = None,
    ) -> None:
        for key, value, allowed in (("dtype", dtype, tuple(DTYPES)), ("precision", precision, PRECISIONS)):
            if value not in allowed:
                raise Invalid(f"{key} = {value!r} is not one of {', '.join(allowed)}{nearest(value, allowed)}")
        self.device = resolve_device(device)
        self.dtype = DTYPES[dtype]
        self.environment = environment or Environment()
        self.federation = federation
        self._hosts = hosts
        if hosts is None:
            self.environment.check_against(len(federation))
        self._task = task.to(self.device, self.dtype)
        self._stores = {"train": federation.train.to(self.device, self.dtype)}
        if federation.test is not None:
            self._stores["test"] = federation.test.to(self.device, self.dtype)
        self._memory: Tree | None = None  # stacked [K, ...]; None until a rule that trains was met
        self._bf16 = precision == "bf16"
        self._arithmetic = Arithmetic(self.device, precision, deterministic)
        self._programs: dict[tuple[ClientRule, Channel], Program] = {}
        choice = Choice(lane=lane, clients_at_once=clients_at_once, compile=compile)
        self._tuner = Tuner(self.device, choice, rounds_ahead)
        self._elsewhere: Callable[..., Tree] | None = None

    @property
    def task(self) -> Task:
        """The task, with its constants on the device."""
        return self._task

    @property
    def sizes(self) -> np.ndarray:
        """[K] training rows of every client."""
        return self.federation.train.sizes.numpy()

    @property
    def choice(self) -> Choice:
        """The lane that was asked for, or measured to be fastest."""
        return self._tuner.choice

    def pass_on(self, fulfil: Callable[..., Tree]) -> None:
        """Let another `fulfil` carry out the orders of exchanges, such as one that several runs share."""
        self._elsewhere = fulfil

    def adopt(self, choice: Choice) -> None:
        """Take the lane that another engine measured on the same run."""
        self._tuner.choice = choice

    def store(self, rows: Literal["train", "test"]) -> Rows:
        """The rows on the device."""
        if rows not in self._stores:
            raise Invalid("the federation has no test rows: pass test=... when building it")
        return self._stores[rows]

    def start(self) -> Tree:
        """The task's initial model, on the device."""
        return tree.cast_floating(tree.to(self._task.start(), self.device), self.dtype)

    def available(self, round: int, seed: int) -> np.ndarray:
        """[K] who could take part."""
        return self.environment.available(round, len(self.federation), seed)

    def planned(self, client: ClientRule, ids: np.ndarray, *, round: int, seed: int) -> np.ndarray:
        """[m] steps that clients will do in a round's exchange; 0 for those who will not be heard."""
        steps = planned_steps(self.environment, client.work, ids, self.sizes[ids], round, seed)
        return np.where(self.environment.reachable(round, ids, seed), steps, 0)

    @property
    def wait_policy(self) -> WaitPolicy:
        """How long the server waits for replies, in simulated time."""
        return clock.wait_policy(self.environment)

    @torch.no_grad()
    def seconds(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, ids: np.ndarray, *, round: int, seed: int
    ) -> np.ndarray:
        """[m] simulated seconds until each reply is there."""
        sizes = self.store(client.work.rows).sizes.numpy()[ids]
        steps = planned_steps(self.environment, client.work, ids, sizes, round, seed)
        program, memory = self._program(client, channel), self._memory_of(client, channel)
        return timing.seconds(self.environment, program, broadcast, memory, ids, sizes, steps, round=round, seed=seed)

    def recall(self) -> Tree:
        """Every client's memory, stacked [K, ...]; later rounds do not change what is returned."""
        return self._memory or {}

    def restore(self, memory: Tree) -> None:
        """Put saved memories back; {} forgets all."""
        self._memory = tree.to(memory, self.device) if memory else None

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
        """Send, let the clients work, collect what arrives, in client order."""
        sizes = self.store(client.work.rows).sizes.numpy()[ids]
        orders = Orders.given(self.environment, client.work, ids, sizes, round=round, seed=seed)
        fulfil = self._elsewhere or self.fulfil
        reply = fulfil(client, channel, broadcast, orders, round=round, seed=seed)
        return orders.cohort(reply, self._sent(orders.sizes.astype(np.float64)), round)

    @torch.no_grad()
    def fulfil(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, orders: Orders, *, round: int, seed: int
    ) -> Tree:
        """The replies, stacked in the orders' client order, of clients that are told what to do."""
        with self._arithmetic:
            return self._work(client, channel, broadcast, orders, round, seed)

    @torch.no_grad()
    def settle(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, orders: Orders, *, round: int, seed: int
    ) -> Choice:
        """Measure the lanes on these orders without carrying them out."""
        with self._arithmetic:
            self._work(client, channel, broadcast, orders, round, seed, only_measure=True)
        return self.choice

    def _work(
        self,
        client: ClientRule,
        channel: Channel,
        broadcast: Broadcast,
        orders: Orders,
        round: int,
        seed: int,
        only_measure: bool = False,
    ) -> Tree:
        ids, place, steps = orders.ids, orders.place, orders.steps
        if not len(ids):
            return {}
        program, store = self._program(client, channel), self.store(client.work.rows)
        memory, where = self._memory_of(client, channel), self._where(ids)
        shared = {**broadcast.shared, "round": torch.full((), round, device=self.device)}

        def prepare(group: np.ndarray, most: int | None = None) -> tuple[Tree, Context, plans.Plan]:
            """The carry, context and plan of some of the cohort, for at most so many steps."""
            who, rows = (self._sent(a[group]) for a in (where, place))
            todo = steps[group] if most is None else np.minimum(steps[group], most)
            context = Context(shared, tree.rows(broadcast.personal, rows), tree.rows(memory, who))
            plan = plans.draw(client.work, store, ids[group], todo, seed=seed, round=round, where=where[group])
            return program.begin(keys[self._sent(group)], context), context, plan

        keys = self._sent(rng.fold(rng.key(seed, "channel", round), ids))
        order = np.lexsort((ids, -steps))  # longest first, then by id
        if client.work.trains:
            self._tuner.settle(program, store, order, prepare)
        if only_measure:
            return {}

        def train(group: np.ndarray) -> tuple[Tree, Tree]:
            carry, context, plan = prepare(group)
            carry = self._tuner.fold(program, carry, context, plan, store)
            return program.end(carry, keys[self._sent(group)], context)

        done: list[tuple[Tree, Tree]] = []
        while not done:
            try:
                done = [train(group) for group in self._tuner.groups(order)]
            except torch.OutOfMemoryError:  # nothing was kept yet: start over with smaller groups
                if not self._tuner.halve(len(order)):
                    raise
        reply, kept = tree.concatenate([reply for reply, _ in done]), tree.concatenate([kept for _, kept in done])
        if (np.diff(order) < 0).any():  # back into ascending client order
            back = self._sent(np.argsort(order))
            reply, kept = tree.rows(reply, back), tree.rows(kept, back)
        if client.work.trains:
            self._remember(memory, where, kept, reply, orders.heard)
        return reply

    def _where(self, ids: np.ndarray) -> np.ndarray:
        """The clients' places in the federation held here."""
        return ids if self._hosts is None else np.searchsorted(self._hosts, ids)

    def _sent(self, values: np.ndarray) -> Tensor:
        """On the device, without waiting for the work that is queued there."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def _program(self, client: ClientRule, channel: Channel) -> Program:
        known = self._programs.get((client, channel))
        if known is None:
            known = Program(client, channel, self._task, self.dtype, self.device, self._bf16)
            self._programs[client, channel] = known
        return known

    def _memory_of(self, client: ClientRule, channel: Channel) -> Tree:
        """Memories stacked [K, ...]; made when a rule that trains is first met."""
        if self._memory is None and client.work.trains:
            start = self.start()
            self._memory = tree.repeat(memories(client.init(start), channel.init(start)), len(self.federation))
        return self._memory or {}

    def _remember(self, memory: Tree, places: np.ndarray, new: Tree, reply: Tree, heard: np.ndarray) -> None:
        if not any(True for _ in tree.leaves(memory)):
            return
        where = self._sent(places)
        # a client that was not heard, or broke down, keeps what it had
        sound = self._sent(heard) & tree.all_finite(reply) & tree.all_finite(new)
        new = tree.where(sound, new, tree.rows(memory, where))
        self._memory = tree.map_leaves(lambda old, fresh: old.index_copy(0, where, fresh), memory, new)


def resolve_device(name: str) -> torch.device:
    """'auto' is the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise Invalid(f"device = {name!r} cannot be used here ({problem}): try auto, cpu or cuda") from problem
    return device
