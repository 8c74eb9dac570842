"""Local training that also reports how often each label occurred."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from consilience.client.local_training import LocalTraining
from consilience.client.wrapped import Wrapped
from consilience.core.capabilities import ChecksTask, capability
from consilience.core.plans import Batch
from consilience.core.protocols import ClientRule
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.task.latent import classifier


@dataclass(frozen=True, kw_only=True)
class LabelCounting(Wrapped):
    """Local training whose reply holds `labels`: the share of every class among the rows used (0 without steps)."""

    training: ClientRule = field(default_factory=LocalTraining)

    def check_against(self, task: Task) -> None:
        """Refuse a task without class numbers, and what training refuses."""
        if not task.kind.class_per_row:
            raise Invalid(f"counting labels needs one class number per row: {task.kind.name} has none")
        checking = capability(self.training, ChecksTask)
        if checking is not None:
            checking.check_against(task)

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """As in training, with label counts at zero."""
        params = message["model"]["params"]
        classes = len(params[classifier(params).weight])
        none = torch.zeros(classes, dtype=torch.float64, device=message["round"].device)
        return {"training": self.training.begin(task, message, memory), "labels": none}

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """One training step, counting its labels."""
        every = torch.arange(len(carry["labels"]), device=batch.y.device)
        met = (batch.y.unsqueeze(1) == every).to(torch.float64)  # [B, C]
        met = met if batch.mask is None else met * batch.mask.unsqueeze(1)
        trained = self.training.step(task, carry["training"], batch, message, memory)
        return {"training": trained, "labels": carry["labels"] + met.sum(0)}

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """Training's reply, and the label shares."""
        reply, kept = self.training.end(task, carry["training"], message, memory)
        return {**reply, "labels": carry["labels"] / carry["labels"].sum().clamp(min=1)}, kept
