"""Federated evaluation is an exchange too: the client's reply is how well the model does on its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from consilience.core.capabilities import PersonalRule
from consilience.core.plans import Batch, Work
from consilience.core.task import Task
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """One pass in order, no training: sums of loss and of correct decisions (0 in a regression), and the rows.

    The model is the received one, or with `rule` the client's own.
    """

    work: Work = field(default_factory=lambda: Work(epochs=1, batch_size=256, shuffle=False, rows="test", trains=False))
    rule: PersonalRule | None = None

    def init(self, start: Tree) -> Tree:
        """Nothing is remembered."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """All sums at zero."""
        zero = torch.zeros((), dtype=torch.float64, device=message["round"].device)
        return {"loss": zero, "correct": zero, "rows": zero}

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """Add one batch."""
        model = message["model"] if self.rule is None else self.rule.personal(task, message, memory)
        output, _ = task.apply(model, batch.x, train=False)
        losses = task.losses(output, batch.y)
        mask = torch.ones_like(losses) if batch.mask is None else batch.mask
        correct = torch.zeros_like(losses)
        if task.decides:
            decided = task.decide(output)
            correct = (decided == batch.y.reshape(decided.shape)).to(losses.dtype).reshape(len(losses), -1).mean(1)
        return {
            "loss": carry["loss"] + (losses * mask).sum(),
            "correct": carry["correct"] + (correct * mask).sum(),
            "rows": carry["rows"] + mask.sum(),
        }

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The sums."""
        return carry, memory
