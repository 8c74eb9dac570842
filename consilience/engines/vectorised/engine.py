"""The vectorised engine: the whole cohort trains on one device in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from consilience.core import plans, progress, tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.federation import Federation, Rows
from consilience.core.plans import Plan, Split, Work
from consilience.core.protocols import Channel, ClientRule
from consilience.core.settings import Count, Invalid
from consilience.core.stored_rows import stored_bytes
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.engines.placement import FloatingType, Placement
from consilience.engines.simulated import SimulatedEngine
from consilience.engines.vectorised import obstacles, timing
from consilience.engines.vectorised.arithmetic import Arithmetic, Precision, resolve_precision
from consilience.engines.vectorised.client_memories import ClientMemories
from consilience.engines.vectorised.local_work import LocalWork, channel_keys, on_device
from consilience.engines.vectorised.program import Context, Program
from consilience.engines.vectorised.tuning import LaneChoice, LaneName, Tuner
from consilience.engines.workload import Workload, planned_steps
from consilience.environments.environment import Environment
from consilience.stores.row_blocks import RowPlace
from consilience.stores.staging import Stager, Where, placed_rows, smaller_groups

RunClients = Callable[..., Tree]
"""What `Vectorised.run_clients` is: (client, channel, broadcast, workload, round=, seed=) -> replies."""


class Vectorised(SimulatedEngine):
    """Data, client memories and models stay on the device; the cohort is cut into groups that fit and run in a lane.

        engine = cs.Vectorised(cs.Task(module), federation, lane="batched")
        for done in cs.run(cs.fedavg(lr=0.1), engine, rounds=10):
            print(done.number, done.cohort.ids)

    environment: which clients are slow, unavailable or silent; by default none.
    device: "auto" (the GPU if there is one), "cpu", "cuda" or "cuda:1".
    dtype, precision: "float32" or "float64"; "full", "tf32" or "bf16" arithmetic, or "auto": "tf32" where a GPU has it,
    "full" on a CPU. deterministic: only kernels that repeat bit for bit.
    lane: "batched" (one vmapped step for all; "batched-matmul": with convolutions as matrix products), "streams"
    (clients side by side: CUDA graphs, or one per CPU core), "serial", or "auto", which measures them on the first
    round. `choice` is the one in use.
    clients_at_once: the largest group; by default what fits into memory.
    compile, rounds_ahead: whether to compile (CUDA only); by default if it pays for itself in the rounds ahead. On a
    CPU, batching is only tried if there are enough of them.
    memory: where the memories of clients that have trained are kept: on the "device", in "host" memory
    (page-locked for a GPU), in a temporary "file" in `memory_folder`, or "auto": on the device up to a quarter of its
    memory, then on the host up to a quarter of its memory, then in a file. Results do not depend on it.
    rows: where the data are kept: "auto" leaves rows in files there and moves others to the device; "device"
    and "host" bring all of them there. Of rows elsewhere, those that a group of clients needs are read, the next
    group's while this one trains. Results do not depend on it.
    hosts: the federation holds only these clients of a larger one, in ascending order (an engine that spreads its
    clients gives each of several such engines its own, and calls `run_clients`).
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
        rows: Where = "auto",
        hosts: np.ndarray | None = None,
    ) -> None:
        super().__init__(task, federation, environment, Placement.of(device, dtype))
        if hosts is None:
            self.environment.check_against(len(federation))
        splits = {"train": federation.train, "test": federation.test, "validation": federation.validation}
        present = {name: split for name, split in splits.items() if split is not None}
        self.stores = {name: placed_rows(split, *self._placement, rows) for name, split in present.items()}
        place = RowPlace(memory, None if memory_folder is None else Path(memory_folder))
        start = functools.partial(self._placement.start, self._task)
        self.memories = ClientMemories(len(federation), self.device, place, start, hosts)
        self.precision = resolve_precision(precision, self.device, self.dtype)
        self._arithmetic = Arithmetic(self.device, self.precision, deterministic)
        self._programs: dict[tuple[ClientRule, Channel], Program] = {}
        choice = LaneChoice(lane=lane, clients_at_once=clients_at_once, compile=compile)
        self._stager = Stager(self.device)
        self._tuner = Tuner(self.device, choice, rounds_ahead, self._stager)
        self._delegate: RunClients | None = None
        self._drawn: dict[Any, Plan] = {}  # of the next round, by all that they depend on

    @property
    def test_rows(self) -> Rows | None:
        """The test rows on the device."""
        return self.stores.get("test")

    @property
    def choice(self) -> LaneChoice:
        """The lane that was set, or measured to be fastest."""
        return self._tuner.choice

    @property
    def resolved_settings(self) -> dict[str, Any]:
        """The device, the precision, and what is known of the lane."""
        return {"device": str(self.device), "precision": self.precision, **self._tuner.choice.resolved}

    def use_lane(self, choice: LaneChoice) -> None:
        """Take the lane that another engine measured on the same run."""
        self._tuner.choice = choice

    def delegate(self, run_clients: RunClients) -> None:
        """Use another `run_clients` for exchanges, such as one that several runs share."""
        self._delegate = run_clients

    def store(self, rows: Split) -> Rows:
        """The rows on the device."""
        if rows not in self.stores:
            raise Invalid(f"the federation has no {rows} rows: pass {rows}=... when building it")
        return self.stores[rows]

    def close(self) -> None:
        """Do nothing: this engine starts no process."""

    @torch.no_grad()
    def seconds(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, ids: np.ndarray, *, round: int, seed: int
    ) -> np.ndarray:
        """[m] simulated seconds until each reply arrives."""
        sizes = self.store(client.work.rows).sizes.numpy()[ids]
        steps = planned_steps(self.environment, client.work, ids, sizes, round, seed)
        program, memory = self.program(client, channel), self.memories.read(client, channel, ids[:1])
        return timing.seconds(self.environment, program, broadcast, memory, ids, sizes, steps, round=round, seed=seed)

    def recall(self) -> Tree:
        """Every client's memory, stacked [K, ...], read when something asks; later rounds do not change it."""
        return self.memories.tree()

    def restore(self, memory: Tree) -> None:
        """Restore saved memories; {} clears all."""
        self.memories.restore(memory)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes that clients' memories take on the device, in host memory and in a file."""
        return self.memories.nbytes

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
        """Send the broadcast, run the clients, collect the replies in client order."""
        sizes = self.store(client.work.rows).sizes.numpy()[ids]
        workload = Workload.of(self.environment, client.work, ids, sizes, round=round, seed=seed)
        run_clients = self._delegate or self.run_clients
        reply = run_clients(client, channel, broadcast, workload, round=round, seed=seed)
        return workload.cohort(reply, round, self.device)

    @torch.no_grad()
    def run_clients(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, workload: Workload, *, round: int, seed: int
    ) -> Tree:
        """The replies, stacked in ascending client order, of clients whose work has been decided."""
        if not len(workload.ids):
            return {}
        reply, kept = self.run_groups(self._local_work(client, channel, broadcast, workload, round, seed))
        if client.work.trains and kept:
            self.memories.remember(client, channel, workload, kept, reply)
        return reply

    @torch.no_grad()
    def measure_lanes(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, workload: Workload, *, round: int, seed: int
    ) -> LaneChoice:
        """Choose a lane by trials on this work, without doing it."""
        work = self._local_work(client, channel, broadcast, workload, round, seed)
        with self._arithmetic:
            self._tuner.choose_lane(work.program, work.store, work.order, work.sizes, work.prepare)
        return self.choice

    @torch.no_grad()
    def run_groups(self, work: LocalWork) -> tuple[Tree, Tree]:
        """Stacked (replies, memories), in the work's own order: groups run one after the other, each in the lane.

        The first training chooses the lane; groups are halved, and the work is begun anew, where memory runs out.
        """
        program, order, done = work.program, work.order, list[tuple[Tree, Tree]]()
        with self._arithmetic:
            if program.rule.work.trains:
                self._tuner.choose_lane(program, work.store, order, work.sizes, work.prepare)
            while not done:
                progress.begin(len(order) if program.rule.work.trains else 0)
                try:
                    groups = self._groups(order, work.store, work.sizes)
                    draw = lambda one: work.drawn.pop(one.tobytes(), None) or work.draw(one, None)  # noqa: E731
                    for group, plan, store in self._stager.ahead(groups, draw, work.store):
                        keys, context = work.keys[on_device(group, self.device)], work.context(group)
                        carry = self._tuner.fold(program, program.begin(keys, context), context, plan, store)
                        done.append(program.end(carry, keys, context))
                        del carry, context  # solvers' states and memories: not kept while the next group trains
                except torch.OutOfMemoryError:  # results so far are dropped: start over with smaller groups
                    done = []
                    self._stager.forget()
                    if not self._tuner.halve(len(order)):
                        raise
                except RuntimeError as problem:
                    obstacles.refuse_unbatched(problem, self.choice.lane)
                    raise
            reply, kept = done[0] if len(done) == 1 else (tree.concatenate(parts) for parts in zip(*done))
            if (np.diff(order) < 0).any():
                back = on_device(np.argsort(order), self.device)
                reply, kept = tree.rows(reply, back), tree.rows(kept, back)
        return reply, kept

    def _groups(self, order: np.ndarray, store: Rows, sizes: np.ndarray) -> list[np.ndarray]:
        """The groups in which clients train; where rows are read as needed and clients train apart, smaller ones."""
        groups = self._tuner.groups(order)
        if self._tuner.choice.lane not in ("serial", "streams") or not store.is_stored:
            return groups
        return smaller_groups(groups, stored_bytes(store.x) * sizes, torch.get_num_threads())

    def program(self, client: ClientRule, channel: Channel) -> Program:
        """The rule and the channel bound to this engine's task; traces are kept with it."""
        known = self._programs.get((client, channel))
        if known is None:
            client.work.check_targets(self.store(client.work.rows).y)
            known = Program(client, channel, self._task, self.dtype, self.device, self.precision == "bf16")
            self._programs[client, channel] = known
        return known

    def plan(self, work: Work, ids: np.ndarray, steps: np.ndarray, *, round: int, seed: int) -> Plan:
        """The batch plan of these clients for these numbers of steps, perhaps drawn ahead."""
        known = self._drawn.pop((work, round, seed, ids.tobytes(), steps.tobytes()), None)
        if known is not None:
            return known
        where = self.memories.where(ids)
        return plans.draw(work, self.store(work.rows), ids, steps, seed=seed, round=round, where=where)

    @property
    def prepares_ahead(self) -> bool:
        """Whether the host would otherwise wait for the device."""
        return self.device.type == "cuda" and self._delegate is None

    @torch.no_grad()
    def prepare_round(self, client: ClientRule, ids: np.ndarray, *, round: int, seed: int) -> None:
        """Draw the plans of the clients that will probably be asked next; they take their turn on the device."""
        sizes, work = self.store(client.work.rows).sizes.numpy()[ids], client.work
        workload = Workload.of(self.environment, work, ids, sizes, round=round, seed=seed)
        if len(workload.ids) and self.choice.lane != "auto":
            store, drawn = self.store(work.rows), dict[Any, Plan]()
            for group in self._groups(workload.longest_first(), store, workload.sizes):
                who, steps = workload.ids[group], workload.steps[group]
                key = (work, round, seed, who.tobytes(), steps.tobytes())
                drawn[key] = self.plan(work, who, steps, round=round, seed=seed)
            self._drawn = drawn  # what was drawn before is dropped
            self._stager.forget()
            self._stager.begin(next(iter(drawn.values())), store)

    def _local_work(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, workload: Workload, round: int, seed: int
    ) -> LocalWork:
        ids, place, steps = workload.ids, workload.place, workload.steps
        shared = {**broadcast.shared, "round": torch.full((), round, device=self.device)}

        def context(group: np.ndarray) -> Context:
            personal = tree.rows(broadcast.personal, on_device(place[group], self.device))
            return Context(shared, personal, self.memories.read(client, channel, ids[group]))

        def plan(group: np.ndarray, most: int | None) -> Plan:
            todo = steps[group] if most is None else np.minimum(steps[group], most)
            return self.plan(client.work, ids[group], todo, round=round, seed=seed)

        return LocalWork(
            program=self.program(client, channel),
            store=self.store(client.work.rows),
            order=workload.longest_first(),
            sizes=workload.sizes,
            keys=channel_keys(ids, self.device, round=round, seed=seed),
            context=context,
            draw=plan,
            drawn={},
        )
