"""FedFa: weights from training accuracy and participation counts (Huang et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.settings import Checked, Invalid, Positive, Probability
from consilience.core.tree import Tree
from consilience.server.averaging.weighting.fedadp import took_part


@dataclass(frozen=True, kw_only=True)
class FedFaWeights(Checked):
    """gamma M_k + (1 - gamma) E_k over the round's participants; M and E are normalised information contents.

    M_k ~ -log2(share of the accuracies), E_k ~ -log2(1 - share of the participations). The formula gives the *least*
    accurate client the largest M, although its text says the opposite; the authors' code follows the formula, as here.
    """

    gamma: Probability = 0.5
    eps: Positive = 1e-6  # in place of a zero inside a logarithm
    needs_each_reply = True  # each client's accuracy is read

    def init(self, start: Tree, clients: int) -> Tree:
        """Participation counts of all clients."""
        device = next(iter(start["params"].values())).device
        return {"rounds": torch.zeros(clients, dtype=torch.float64, device=device)}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """Eqs (16)-(18) of DUW."""
        if "correct" not in cohort.reply:
            raise Invalid("FedFa weights need each client's accuracy after training: use the algorithm fedfa")
        accuracy = (cohort.reply["correct"] / cohort.reply["rows"].clamp(min=1)).to(torch.float64).clamp(0, 1)
        worked = took_part(cohort)
        ids = torch.from_numpy(np.asarray(cohort.ids)).to(worked.device)
        rounds = state["rounds"][ids] + worked
        state = {"rounds": state["rounds"].index_copy(0, ids, rounds)}
        weights = cohort.examples / cohort.examples.sum()
        if int(worked.sum()) == 1:
            weights = worked.to(torch.float64)
        elif bool(worked.any()):
            by_accuracy = self._content(_shares(accuracy, worked), worked)
            by_rounds = self._content(1 - _shares(rounds, worked), worked)
            weights = self.gamma * by_accuracy + (1 - self.gamma) * by_rounds
        return weights, state, {"accuracy": accuracy}

    def _content(self, share: Tensor, worked: Tensor) -> Tensor:
        """[m] -log2(share), normalised over the participants."""
        content = torch.where(worked, -torch.where(share > 0, share, self.eps).log2(), 0.0)
        return content / content.sum()


def _shares(values: Tensor, worked: Tensor) -> Tensor:
    """[m] shares of the sum over the participants; 0 if the sum is 0."""
    values = values * worked
    return values / values.sum().clamp(min=torch.finfo(torch.float64).tiny)
