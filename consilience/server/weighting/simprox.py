"""SimProx: weigh clients by Gaussian + cosine similarity and by how far they moved (El-Niss et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.checks import Positive, Probability, check
from consilience.core.exchange import Cohort, Notes
from consilience.core.tree import Tree
from consilience.server.geometry import Geometry, cosines, measure


@dataclass(frozen=True, kw_only=True)
class SimProxWeights:
    """alpha_i ~ exp(-g_i) (1 + mean_{j != i} S_ij), then a softmax; S mixes cosine (share lambda) and Gaussian.

    Only learnable parameters are compared, and example counts play no part. The softmax (eq 14) keeps every weight
    within a factor e of any other; `softmax=False` stops at the normalised alpha (eq 13).
    """

    lambda_0: Probability = 0.7
    tau: Positive = 0.5  # Paper: a "predefined threshold", never given. Here: 0.5, a guess.
    softmax: bool = True

    def __post_init__(self) -> None:
        check(self)

    @property
    def needs_each_reply(self) -> bool:
        """Similarities need every model."""
        return True

    def init(self, start: Tree, clients: int) -> Tree:
        """No state."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """Weights of this round's models around the broadcast one."""
        if len(cohort) == 1:
            return torch.ones_like(cohort.examples), state, {}
        geometry = measure(cohort.reply["model"]["params"], model["params"])
        between, to_global = cosines(geometry, cohort.ids.tolist())
        share = self._lambda(to_global)
        similarity = share * between + (1 - share) * gaussian(geometry)
        weights = self._weights(similarity, geometry.movement)
        agree = geometry.distance.sum() == 0  # equal models weigh the same, to the last bit
        weights = torch.where(agree, 1 / len(cohort), weights)
        notes = {"similarity": similarity, "lambda": share, "movement": geometry.movement, "all_alike": agree}
        return weights.to(cohort.examples.device), state, notes

    def _lambda(self, to_global: Tensor) -> Tensor:
        """Eq (10)'s mixing share, reduced when clients point away from the global model."""
        mean = to_global.mean()
        # Paper: lambda_0 * mean / tau, negative when clients oppose the model. Here: 0 then, since lambda is in [0, 1].
        return torch.where(mean < self.tau, self.lambda_0 * (mean / self.tau).clamp(min=0), self.lambda_0)

    def _weights(self, similarity: Tensor, movement: Tensor) -> Tensor:
        m = len(similarity)
        typical = (similarity.sum(1) - similarity.diagonal()) / (m - 1)
        # Paper: exp(-g) (...) normalised, which is 0/0 once g exceeds 745. Here: the same number in the log domain.
        alpha = torch.softmax((1 + typical).clamp(min=1e-300).log() - movement, 0)
        return torch.softmax(alpha, 0) if self.softmax else alpha


def gaussian(geometry: Geometry) -> Tensor:
    """exp(-d_ij^2 / 2 sigma^2) with sigma the mean distance over pairs (eqs 7, 8); all ones when all models agree."""
    m = len(geometry.distance)
    sigma = geometry.distance.sum() / (m * (m - 1))
    ratio = torch.where(sigma > 0, geometry.distance / sigma, 0.0)
    return torch.exp(-0.5 * ratio.square())
