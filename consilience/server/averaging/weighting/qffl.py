"""q-FFL: clients with a large loss count more (Li et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.settings import Invalid, NonNegative, check
from consilience.core.tree import Tree

LEAST_LOSS = 1e-10  # as the authors add to every loss: with q < 1 a loss of zero would divide by zero


@dataclass(frozen=True, kw_only=True)
class QfflWeights:
    """F_k^q, normalised, where F_k is the client's mean loss at the model it was sent; q = 0 counts all the same."""

    q: NonNegative = 1.0

    def __post_init__(self) -> None:
        check(self)

    @property
    def needs_each_reply(self) -> bool:
        """Each client's loss is read."""
        return True

    def init(self, start: Tree, clients: int) -> Tree:
        """No state."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """The shares of the Delta_k, as a softmax of logarithms."""
        losses = losses_at_start(cohort, "q-FFL", "qffl")
        return torch.softmax(self.q * losses.clamp(min=LEAST_LOSS).log(), 0), state, {"start_loss": losses}


def losses_at_start(cohort: Cohort, method: str, recipe: str) -> Tensor:
    """[m] each client's mean loss at the model it was sent."""
    if "start_loss" not in cohort.reply:
        raise Invalid(f"{method} needs each client's loss at the model it was sent: use the algorithm {recipe}")
    return cohort.reply["start_loss"].to(torch.float64)
