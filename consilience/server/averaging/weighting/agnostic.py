"""Agnostic federated learning: the mixture of clients that the model does worst on (Mohri et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.settings import Positive, check
from consilience.core.tree import Tree
from consilience.server.averaging.weighting.qffl import losses_at_start


@dataclass(frozen=True, kw_only=True)
class AgnosticWeights:
    """lambda <- projection onto the simplex of lambda + `step_size` F, where F_k is client k's loss at the model sent.

    The weights of a round are the lambda from before it, over the clients that replied.
    """

    step_size: Positive = 0.1

    def __post_init__(self) -> None:
        check(self)

    @property
    def needs_each_reply(self) -> bool:
        """Each client's loss is read."""
        return True

    def init(self, start: Tree, clients: int) -> Tree:
        """Every client the same."""
        device = next(iter(start["params"].values())).device
        return {"lambda": torch.full((clients,), 1 / clients, dtype=torch.float64, device=device)}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """The present mixture; then it moves towards clients with a large loss."""
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
