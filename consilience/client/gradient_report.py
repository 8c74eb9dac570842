"""Clients that report gradients of their minibatch losses, during training or at a fixed model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad

from consilience.client.local_training import LocalTraining
from consilience.client.wrapped import Wrapped
from consilience.core.plans import Batch, Work
from consilience.core.protocols import ClientRule
from consilience.core.task import Task
from consilience.core.tree import Tree, map_leaves
from consilience.task.losses import average

ReportedLoss = Literal["task", "squared_error", "squared_error_logits"]
"""The task's own loss, or the squared error of probabilities or of logits against one-hot labels."""


@dataclass(frozen=True, kw_only=True)
class GradientReport:
    """One pass at the received model without training: the sums of the minibatch losses and of their gradients."""

    work: Work = field(default_factory=Work)
    loss: ReportedLoss = "task"

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """Both sums at zero; a copy of the buffers, since batch norm writes to them."""
        return {**_zeros(message), "buffers": message["model"]["buffers"]}

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """Add one minibatch."""
        model = {"params": message["model"]["params"], "buffers": carry["buffers"]}
        return {**_add(carry, task, model, batch, self.loss), "buffers": carry["buffers"]}

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The sums; the client's memory is unchanged."""
        return {"gradient": carry["gradient"], "loss_sum": carry["loss_sum"]}, memory


@dataclass(frozen=True, kw_only=True)
class WithGradientSum(Wrapped):
    """Training whose reply also holds the sums of the minibatch losses and of their gradients along the way."""

    training: ClientRule = field(default_factory=LocalTraining)
    loss: ReportedLoss = "task"

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """As in training, both sums at zero."""
        return {"training": self.training.begin(task, message, memory), "sums": _zeros(message)}

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """Add the minibatch, then take the step."""
        sums = _add(carry["sums"], task, trained_model(carry), batch, self.loss)
        return {"training": self.training.step(task, carry["training"], batch, message, memory), "sums": sums}

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The reply of training, and the sums."""
        reply, kept = self.training.end(task, carry["training"], message, memory)
        return {**reply, **carry["sums"]}, kept


def minibatch_loss(task: Task, model: Tree, batch: Batch, loss: ReportedLoss = "task") -> Tensor:
    """The mean loss of the live rows, in training mode."""
    output, _ = task.apply(model, batch.x, train=True, mask=batch.mask, key=batch.key)
    if loss == "task":
        return average(task.row_losses(output, batch), batch.mask)
    found = output.softmax(1) if loss == "squared_error" else output  # [B, C]
    classes = torch.arange(output.shape[1], device=output.device)
    truth = (batch.y.unsqueeze(1) == classes).to(output.dtype)
    return average((found - truth).square().mean(1), batch.mask)


def trained_model(carry: Tree) -> Tree:
    """The model inside a carry that will be sent, also inside wrapped rules."""
    if "model" in carry:
        model: Tree = carry["model"]
        return model
    return trained_model(carry["training"] if "training" in carry else carry["shared"])


def _zeros(message: Tree) -> Tree:
    zero = torch.zeros((), dtype=torch.float64, device=message["round"].device)
    return {"gradient": map_leaves(torch.zeros_like, message["model"]["params"]), "loss_sum": zero}


def _add(sums: Tree, task: Task, model: Tree, batch: Batch, loss: ReportedLoss) -> Tree:
    def mean_loss(params: Tree) -> tuple[Tensor, Tensor]:
        found = minibatch_loss(task, {"params": params, "buffers": model["buffers"]}, batch, loss)
        return found, found.detach()

    grads, found = grad(mean_loss, has_aux=True)(model["params"])
    return {"gradient": map_leaves(torch.add, sums["gradient"], grads), "loss_sum": sums["loss_sum"] + found}
