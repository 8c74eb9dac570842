"""q-FFL's server step size from the clients' losses and updates (Li et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.remote import each
from consilience.core.settings import Checked, NonNegative, Positive
from consilience.core.tree import Tree, map_leaves
from consilience.server.averaging.weighting.by_loss import LEAST_LOSS, losses_at_start
from consilience.server.protocols import RoundOutcome


@dataclass(frozen=True, kw_only=True)
class QfflStep(Checked):
    """Scales the server's step to that of q-FedAvg: sum_k Delta_k / sum_k h_k.

    Delta_k = F_k^q L (w - w_k) and h_k = q F_k^(q-1) |L (w - w_k)|^2 + L F_k^q. With shares p_k ~ F_k^q the quotient is
    the weighted mean of the w - w_k, times 1 / (1 + q L sum_k p_k |w - w_k|^2 / F_k).
    """

    q: NonNegative = 1.0
    lipschitz: Positive = 100.0
    name = "qffl_step"  # its key in the server's state
    needs_each_reply = True  # the length of each update is read

    def initial(self, start: Tree, clients: int) -> Tree:
        """Nothing is kept."""
        return {}

    def broadcast(self, ledger: Tree) -> Tree:
        """Nothing is sent."""
        return {}

    def update(self, ledger: Tree, round: RoundOutcome) -> tuple[Tree, Tree]:
        """Parameters between `before` and `after`."""
        losses = losses_at_start(round.cohort, "q-FFL", "qffl").clamp(min=LEAST_LOSS)
        squares = torch.zeros_like(losses)
        values = round.cohort.reply["model"]["params"]
        for found in each(_squares, list(values.values()), [round.before[name] for name in values]):
            squares = squares + found
        share = 1 / (1 + self.q * self.lipschitz * (round.weights * squares / losses).sum())
        return ledger, map_leaves(lambda w, to: w + share.to(w.dtype) * (to - w), round.before, round.after)


def _squares(value: Tensor, before: Tensor) -> Tensor:
    """[m] squared norms of the updates of one tensor."""
    apart = value.to(torch.float64) - before.to(torch.float64)
    return apart.reshape(len(apart), -1).square().sum(1)
