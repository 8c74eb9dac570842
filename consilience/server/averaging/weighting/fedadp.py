"""FedAdp: larger weights for clients whose update is aligned with the mean update (Wu and Wang 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.remote import each
from consilience.core.settings import Checked, Positive
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedAdpWeights(Checked):
    """N_k exp(h(angle_k)), normalised; h(a) = beta (1 - exp(-exp(-beta (a - 1)))), angles averaged over rounds.

    The angle is that between client k's accumulated gradient (w - w_k, up to the learning rate) and the N_k-weighted
    mean of them all. Clients without a reply in this round have weight 0.
    """

    beta: Positive = 7.0  # Paper (Wu and Wang): alpha = 5. Here: 7, as in DUW's experiments.
    needs_each_reply = True  # angles need every update

    def init(self, start: Tree, clients: int) -> Tree:
        """Every client's mean angle and its number of rounds."""
        device = next(iter(start["params"].values())).device
        zeros = torch.zeros(clients, dtype=torch.float64, device=device)
        return {"angle": zeros, "rounds": zeros.clone()}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """Eqs (13)-(15) of DUW."""
        angle = angles(cohort, model)
        ids = torch.from_numpy(np.asarray(cohort.ids)).to(angle.device)
        worked = took_part(cohort)
        # Paper: t counts all rounds. Here: the rounds in which the client participated, so that it is a mean.
        before, rounds = state["angle"][ids], state["rounds"][ids] + worked
        mean = torch.where(worked, before + (angle - before) / rounds.clamp(min=1), before)
        state = {
            "angle": state["angle"].index_copy(0, ids, mean),
            "rounds": state["rounds"].index_copy(0, ids, rounds),
        }
        gain = self.beta * (1 - torch.exp(-torch.exp(-self.beta * (mean - 1))))
        logits = torch.where(worked | ~worked.any(), cohort.examples.log() + gain * worked, -torch.inf)
        return torch.softmax(logits, 0), state, {"angle": mean}


def took_part(cohort: Cohort) -> Tensor:
    """[m] whether each client replied and did at least one step."""
    heard = np.ones(len(cohort), dtype=bool) if cohort.heard is None else cohort.heard
    return torch.from_numpy(heard & (cohort.steps > 0)).to(cohort.examples.device)


def angles(cohort: Cohort, model: Tree) -> Tensor:
    """[m] angles in [0, pi] between each update and their mean by examples; pi/2 where an update is zero."""
    share = cohort.examples / cohort.examples.sum()
    product, square = torch.zeros_like(share), torch.zeros_like(share)
    total = torch.zeros((), dtype=torch.float64, device=share.device)
    values = cohort.reply["model"]["params"]
    for found in each(_terms, list(values.values()), [model["params"][name] for name in values], given=(share,)):
        product, square, total = product + found["product"], square + found["square"], total + found["total"]
    length = (square.sqrt() * total.sqrt()).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.acos((product / length).clamp(-1, 1))


def _terms(value: Tensor, start: Tensor, share: Tensor) -> Tree:
    """What one tensor adds to the products of updates and mean, and to their squared lengths."""
    update = (start.to(torch.float64) - value.to(torch.float64)).reshape(len(value), -1)
    mean = share @ update  # [P]
    return {"product": update @ mean, "square": update.square().sum(1), "total": mean.square().sum()}
