"""Dynamic reweighting: clients that find the broadcast model hard count more (Zhao and Joshi 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.settings import Invalid, NonNegative, check
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class DrWeights:
    """N_k loss_k^(q+1), normalised, where loss_k is the client's mean loss at the model it was sent."""

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
        """Eq (12) of DUW, as a softmax of logarithms."""
        if "start_loss" not in cohort.reply:
            raise Invalid("DR weights need each client's loss at the model it was sent: use the algorithm dr_fedavg")
        losses = cohort.reply["start_loss"].to(torch.float64)
        weights = torch.softmax(cohort.examples.log() + (self.q + 1) * losses.clamp(min=1e-300).log(), 0)
        return weights, state, {"start_loss": losses}
