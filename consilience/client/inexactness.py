"""How inexactly a client solved its subproblem: gamma = |grad h(w_k; w)| / |grad h(w; w)| (FedProx, definition 2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad

from consilience.client.local_training import LocalTraining
from consilience.client.wrapped import Wrapped
from consilience.core.capabilities import PostTrainingPass, Reasons
from consilience.core.plans import Batch, Work
from consilience.core.protocols import ClientRule
from consilience.core.settings import Checked, NonNegative
from consilience.core.task import Task
from consilience.core.tree import Tree, leaves, map_leaves

TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class Inexactness(Checked):
    """A pass without training: the full gradient of h = F + mu/2 |. - w|^2 at w and at the client's trained model."""

    mu: NonNegative = 0.1
    work: Work = field(default_factory=lambda: Work(epochs=1, batch_size=256, shuffle=False, trains=False))

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """Both gradients at zero."""
        zero = torch.zeros((), dtype=torch.float64, device=message["round"].device)
        zeros = map_leaves(torch.zeros_like, message["received"]["model"]["params"])
        return {"before": zeros, "after": map_leaves(torch.clone, zeros), "rows": zero}

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """Add one batch's sums of gradients, models in evaluation mode."""
        received = message["received"]["model"]
        trained = {kind: {**values, **message["model"][kind]} for kind, values in received.items()}
        return {
            "before": map_leaves(torch.add, carry["before"], _slope(task, received, batch)),
            "after": map_leaves(torch.add, carry["after"], _slope(task, trained, batch)),
            "rows": carry["rows"] + (len(batch.y) if batch.mask is None else batch.mask.sum()),
        }

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """|grad h(w_k; w)| / |grad h(w; w)|; 1 if the model did not change."""
        rows = carry["rows"].clamp(min=1)
        anchor, trained = message["received"]["model"]["params"], message["model"]["params"]
        after = {
            name: slope / rows + (self.mu * (trained[name] - anchor[name]) if name in trained else 0)
            for name, slope in carry["after"].items()
        }
        before = map_leaves(lambda slope: slope / rows, carry["before"])
        return {"gamma": (_length(after) + TINY) / (_length(before) + TINY)}, memory


@dataclass(frozen=True, kw_only=True)
class ReportsGamma(Wrapped):
    """Training whose reply also holds `gamma`, measured afterwards by two gradients over all of the client's rows."""

    training: ClientRule = field(default_factory=LocalTraining)
    mu: NonNegative = 0.1
    refuses: ClassVar[Reasons] = {
        PostTrainingPass: "has a pass after training, and so has ReportsGamma: there can be only one, leave one out",
    }

    @property
    def post_training(self) -> ClientRule:
        """The measuring pass."""
        return Inexactness(mu=self.mu)


def _slope(task: Task, model: Tree, batch: Batch) -> Tree:
    """The gradient of the sum of losses over the live rows."""

    def total(params: Tree) -> Tensor:
        output, _ = task.apply({"params": params, "buffers": model["buffers"]}, batch.x, train=False)
        losses = task.row_losses(output, batch)
        return losses.sum() if batch.mask is None else (losses * batch.mask).sum()

    return grad(total)(model["params"])


def _length(values: Tree) -> Tensor:
    """The Euclidean norm over all leaves, in float64."""
    squares = [torch.linalg.vector_norm(leaf, dtype=torch.float64).square() for leaf in leaves(values)]
    return torch.stack(squares).sum().sqrt()
