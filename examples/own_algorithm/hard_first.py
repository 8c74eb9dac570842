"""FedAvg with larger weights for clients with larger losses: a part of your own, and a recipe around it."""

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.exchange import Cohort, Notes
from consilience.core.settings import Checked, Positive
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class LossWeights(Checked):
    """Weights ~ N_k (reported loss)^power."""

    power: Positive = 0.5  # power = -1 is refused, by the annotation
    needs_each_reply = True  # it reads each client's loss, so a secure sum is not enough

    def init(self, start: Tree, clients: int) -> Tree:
        """Nothing is remembered between rounds."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """[m] weights that sum to one, in float64; the softmax of logarithms cannot overflow."""
        losses = cohort.reply["loss"].to(torch.float64).clamp(min=1e-12)
        return torch.softmax(self.power * losses.log() + cohort.examples.log(), 0), state, {}


@recipe
def hard_first(*, power: Positive = 0.5, **common: Unpack[Common]) -> Algorithm:
    """No paper: FedAvg with weights ~ N_k (loss_k)^power.

    Use when: the clients with the largest losses matter most.
    Not when: a large loss means wrong labels.
    """
    common.setdefault("weighting", LossWeights(power=power))
    return averaged(**common)
