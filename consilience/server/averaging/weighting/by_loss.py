"""Weights that grow with a client's loss: q-FFL, agnostic federated learning and dynamic reweighting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.settings import Checked, Invalid, NonNegative, Positive
from consilience.core.tree import Tree

LEAST_LOSS = 1e-10  # added to every loss, as in the authors' code: with q < 1 a loss of zero would divide by zero


@dataclass(frozen=True, kw_only=True)
class QfflWeights(Checked):
    """F_k^q, normalised, where F_k is the client's mean loss at the received model; q = 0 gives equal weights."""

    q: NonNegative = 1.0
    needs_each_reply = True  # each client's loss is read

    def init(self, start: Tree, clients: int) -> Tree:
        """No state."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """The shares of the Delta_k, as a softmax of logarithms."""
        losses = losses_at_start(cohort, "q-FFL", "qffl")
        return torch.softmax(self.q * losses.clamp(min=LEAST_LOSS).log(), 0), state, {"start_loss": losses}


def losses_at_start(cohort: Cohort, method: str, recipe: str) -> Tensor:
    """[m] each client's mean loss at the received model."""
    if "start_loss" not in cohort.reply:
        raise Invalid(f"{method} needs each client's loss at the model it was sent: use the algorithm {recipe}")
    return cohort.reply["start_loss"].to(torch.float64)


@dataclass(frozen=True, kw_only=True)
class AgnosticWeights(Checked):
    """lambda <- projection onto the simplex of lambda + `step_size` F, where F_k is client k's loss at the model sent.

    A round uses the lambda from before it, normalised over the clients that replied.
    """

    step_size: Positive = 0.1
    needs_each_reply = True  # each client's loss is read

    def init(self, start: Tree, clients: int) -> Tree:
        """Equal lambda for all clients."""
        device = next(iter(start["params"].values())).device
        return {"lambda": torch.full((clients,), 1 / clients, dtype=torch.float64, device=device)}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """The current lambda as weights, then its update towards clients with a large loss."""
        losses = losses_at_start(cohort, "AFL", "afl")
        where = torch.from_numpy(cohort.ids).to(losses.device)
        mixture = state["lambda"]
        own = mixture[where]
        # Paper: sum_k lambda_k gradient_k over all clients. Here: over those that replied, with lambda scaled to one
        # among them (all the same where it is zero for each), because a round may reach only some clients.
        weights = torch.where(own.sum() > 0, own / own.sum(), 1 / len(own))
        moved = project_to_simplex(mixture.index_add(0, where, self.step_size * losses))
        return weights, {"lambda": moved}, {"start_loss": losses, "lambda": moved}


def project_to_simplex(vector: Tensor) -> Tensor:
    """The nearest vector of non-negative entries that sum to one (Duchi et al. 2008)."""
    ordered = vector.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(vector) + 1, dtype=vector.dtype, device=vector.device)
    threshold = excess[(ordered > excess).sum() - 1]  # the largest count for which the smallest stays positive
    return (vector - threshold).clamp(min=0)


@dataclass(frozen=True, kw_only=True)
class DrWeights(Checked):
    """N_k loss_k^(q+1), normalised, where loss_k is the client's mean loss at the received model."""

    q: NonNegative = 1.0
    needs_each_reply = True  # each client's loss is read

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
