"""SCAFFOLD's client control variate, by option II."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.client.memory.memory import Done
from consilience.client.solvers import SGD, Solver
from consilience.core.settings import Invalid
from consilience.core.tree import Tree, map_leaves


@dataclass(frozen=True, kw_only=True)
class ControlVariate:
    """c_i <- c_i - c + (x - y_i) / (K eta): the client's mean gradient over its K steps; its change goes to the server.

    Parameters only: batch-norm statistics have no gradient.
    """

    @property
    def name(self) -> str:
        """Its key in the client's memory."""
        return "control_variate"

    @property
    def hears(self) -> tuple[str, ...]:
        """The server's c."""
        return ("control_variate",)

    @property
    def says(self) -> tuple[str, ...]:
        """The change of c_i."""
        return ("control_change",)

    def check_solver(self, solver: Solver) -> None:
        """Refuse solvers whose moves do not say what the gradients were."""
        if not isinstance(solver, SGD) or solver.momentum:
            raise Invalid(
                f"control variates (option II) are incompatible with {solver!r}: they read the mean gradient off "
                "the distance moved, which is right for plain SGD only: use optimiser = 'sgd' and momentum = 0"
            )

    def init(self, start: Tree) -> Tree:
        """Zero."""
        return map_leaves(torch.zeros_like, start["params"])

    def update(self, old: Tree, done: Done) -> tuple[Tree, Tree]:
        """A client that did no step keeps its c_i."""
        worked = done.steps > 0
        scale = torch.where(worked, 1 / (done.steps.clamp(min=1) * _rate(done.solver, done.message["round"])), 0.0)

        def change(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
            return torch.where(worked, (x - y) * scale.to(y.dtype) - c, 0.0)

        start, server = done.message["model"]["params"], done.message["control_variate"]
        moved = map_leaves(change, start, done.model["params"], server)
        return map_leaves(torch.add, old, moved), {"control_change": moved}


def _rate(solver: Solver, round: Tensor) -> Tensor:
    """The learning rate of plain SGD in this round."""
    assert isinstance(solver, SGD)
    return solver.lr * torch.pow(torch.as_tensor(solver.decay, dtype=torch.float64, device=round.device), round)
