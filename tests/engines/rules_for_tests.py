"""Rules made for tests: clients that remember, servers that send each client something of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from consilience.core.algorithm import Algorithm, Plain
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.plans import Batch, Work
from consilience.core.protocols import Channel, Selection
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.selection import Everyone


@dataclass(frozen=True, kw_only=True)
class Remembering:
    """Counts its visits, its steps and the sum of the labels it met; sends back its personal message, if any.

    With `counters_only` its memory holds nothing but whole numbers.
    """

    work: Work = field(default_factory=lambda: Work(batch_size=4))
    counters_only: bool = False

    def init(self, start: Tree) -> Tree:
        memory = {"visits": torch.zeros((), dtype=torch.int64)}
        return memory if self.counters_only else {**memory, "labels": torch.zeros((), dtype=torch.float64)}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        zero = torch.zeros((), dtype=torch.float64)
        return {"model": message["model"], "steps": zero, "labels": zero}

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        live = torch.ones_like(batch.y, dtype=torch.float64) if batch.mask is None else batch.mask
        x = (batch.x.flatten(1).mean(1) * live).sum()  # overflows where the data are huge
        params = {name: value + 0.01 * x for name, value in carry["model"]["params"].items()}
        return {
            "model": {"params": params, "buffers": carry["model"]["buffers"]},
            "steps": carry["steps"] + 1,
            "labels": carry["labels"] + (batch.y * live).sum(),
        }

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        after = {"visits": memory["visits"] + 1}
        if not self.counters_only:
            after["labels"] = memory["labels"] + carry["labels"]
        reply = {"model": carry["model"], "visits": after["visits"], "steps": carry["steps"]}
        return {**reply, **({"echo": message["mine"]} if "mine" in message else {})}, after


@dataclass(frozen=True, kw_only=True)
class Personal:
    """Keeps one number per client, sends each its own and adds 1 to those of the clients that replied."""

    @property
    def needs_each_reply(self) -> bool:
        return True

    def init(self, start: Tree, clients: int) -> Tree:
        return {"model": start, "mine": 100.0 * torch.arange(clients, dtype=torch.float64)}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        return Broadcast(shared={"model": state["model"]}, personal={"mine": state["mine"][torch.from_numpy(ids)]})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        mine = state["mine"].clone()
        mine[torch.from_numpy(cohort.ids)] = cohort.reply["echo"] + 1
        return {"model": state["model"], "mine": mine}, {}

    def model(self, state: Tree) -> Tree:
        return state["model"]


def remembering(
    *,
    selection: Selection | None = None,
    channel: Channel | None = None,
    counters_only: bool = False,
    batch_size: int = 4,
) -> Algorithm:
    """Clients with memory, personal messages from the server."""
    return Algorithm(
        selection=selection or Everyone(),
        client=Remembering(counters_only=counters_only, work=Work(batch_size=batch_size)),
        server=Personal(),
        channel=channel or Plain(),
    )
