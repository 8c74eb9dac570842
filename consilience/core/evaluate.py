"""Federated evaluation: clients reply with the sums of the model's metrics on their rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from consilience.core import tree
from consilience.core.capabilities import PersonalRule
from consilience.core.plans import Batch, Work
from consilience.core.task import Task
from consilience.core.tree import Tree

ONE_PASS = Work(epochs=1, batch_size=256, shuffle=False, trains=False)
"""One pass over the training rows, in order."""
VALIDATION = replace(ONE_PASS, rows="validation")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """One pass in order, no training: the sums of the task's metrics.

    Evaluates the received model, or with `rule` the client's personal model (loss and main metric only).
    """

    work: Work = field(default_factory=lambda: replace(ONE_PASS, rows="test"))
    rule: PersonalRule | None = None

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """All sums at zero."""
        return task.metrics.zero(message["round"].device, main_only=self.rule is not None)

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """Add one batch."""
        model = message["model"] if self.rule is None else self.rule.personal(task, message, memory)
        output, _ = task.apply(model, batch.x, train=False)
        dtype = torch.promote_types(output.dtype, torch.float32) if isinstance(output, torch.Tensor) else torch.float32
        mask = torch.ones(len(batch.y), dtype=dtype, device=batch.y.device) if batch.mask is None else batch.mask
        sums = task.metrics.sums(output, batch.y, mask, main_only=self.rule is not None)
        return tree.map_leaves(torch.add, carry, sums)

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The sums."""
        return carry, memory


@dataclass(frozen=True, kw_only=True)
class LossQuery:
    """One pass without training: the sum of losses, of correct decisions (0 if the task has none), and of rows.

    Evaluates the received model, or with `rule` the client's personal model.
    """

    work: Work = ONE_PASS
    rule: PersonalRule | None = None

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """All sums at zero."""
        zero = torch.zeros((), dtype=torch.float64, device=message["round"].device)
        return {"loss": zero, "correct": zero, "rows": zero}

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """Add one batch."""
        model = message["model"] if self.rule is None else self.rule.personal(task, message, memory)
        output, _ = task.apply(model, batch.x, train=False)
        losses = task.row_losses(output, batch)
        mask = torch.ones_like(losses) if batch.mask is None else batch.mask
        return {
            "loss": carry["loss"] + (losses * mask).sum(),
            "correct": carry["correct"] + (task.hits(output, batch.y, mask) * mask).sum(),
            "rows": carry["rows"] + mask.sum(),
        }

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The sums."""
        return carry, memory
