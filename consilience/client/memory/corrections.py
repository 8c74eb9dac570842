"""Correction terms in client memory: control variates, drift and accumulated gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.client.memory.memory import TrainingEnd
from consilience.client.solver_wrappers import plain_sgd, rate_in
from consilience.client.solvers import Solver
from consilience.core.settings import Checked, Invalid, Positive
from consilience.core.tree import Tree, map_leaves


@dataclass(frozen=True, kw_only=True)
class ControlVariate:
    """c_i <- c_i - c + (x - y_i) / (K eta): the client's mean gradient over its K steps; its change goes to the server.

    Parameters only: batch-norm statistics have no gradient.
    """

    name = "control_variate"  # its key in the client's memory

    @property
    def reads_broadcast(self) -> tuple[str, ...]:
        """The server's c."""
        return ("control_variate",)

    @property
    def adds_to_reply(self) -> tuple[str, ...]:
        """The change of c_i."""
        return ("control_change",)

    def check_solver(self, solver: Solver) -> None:
        """Refuse solvers from whose steps the gradients cannot be recovered."""
        if plain_sgd(solver) is None:
            raise Invalid(
                f"control variates (option II) are incompatible with {solver!r}: they read the mean gradient off "
                "the distance moved, which is right for plain SGD only: use optimiser = 'sgd' and momentum = 0, "
                "without clipping, accumulation or a schedule within a round"
            )

    def init(self, start: Tree) -> Tree:
        """Zero."""
        return map_leaves(torch.zeros_like, start["params"])

    def update(self, old: Tree, done: TrainingEnd) -> tuple[Tree, Tree]:
        """A client that did no step keeps its c_i."""
        worked = done.steps > 0
        scale = torch.where(worked, 1 / (done.steps.clamp(min=1) * rate_in(done.solver, done.message["round"])), 0.0)

        def change(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
            return torch.where(worked, (x - y) * scale.to(y.dtype) - c, 0.0)

        start, server = done.message["model"]["params"], done.message["control_variate"]
        moved = map_leaves(change, start, done.model["params"], server)
        return map_leaves(torch.add, old, moved), {"control_change": moved}


@dataclass(frozen=True, kw_only=True)
class Drift:
    """h_i <- h_i + (w_i - w): the sum of all updates of the client."""

    name = "drift"  # its key in the client's memory

    def init(self, start: Tree) -> Tree:
        """Zero."""
        return map_leaves(torch.zeros_like, start["params"])

    def update(self, old: Tree, done: TrainingEnd) -> tuple[Tree, Tree]:
        """Add this round's update; nothing is added to the reply."""
        start = done.message["model"]["params"]
        return map_leaves(lambda h, w, x: h + (w - x), old, done.model["params"], start), {}


@dataclass(frozen=True, kw_only=True)
class Gradient(Checked):
    """g_k <- g_k - alpha (w_k - w): the gradient of the client's loss at w_k, if it solved its problem exactly."""

    alpha: Positive = 0.1
    name = "gradient"  # its key in the client's memory

    def init(self, start: Tree) -> Tree:
        """Zero."""
        return map_leaves(torch.zeros_like, start["params"])

    def update(self, old: Tree, done: TrainingEnd) -> tuple[Tree, Tree]:
        """Add the scaled update of this round; nothing is added to the reply."""
        start = done.message["model"]["params"]
        return map_leaves(lambda g, w, x: g - self.alpha * (w - x), old, done.model["params"], start), {}
