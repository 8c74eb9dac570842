"""SimProx's similarity of whole models: cosines and a Gaussian of distances (El-Niss et al. 2024, eqs 7 to 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from consilience.core.settings import Checked, OnlyWith, Positive, Probability
from consilience.core.tree import Tree
from consilience.server.geometry.geometry import Geometry, cosines, measure, measure_updates

Similarity = Literal["both", "cosine", "gaussian"]
CompareOn = Literal["weights", "updates"]


@dataclass(frozen=True, kw_only=True)
class GaussianCosine(Checked):
    """S = lambda cos(w_i, w_j) + (1 - lambda) exp(-|w_i - w_j|^2 / 2 sigma^2), sigma the mean distance of the pairs.

    lambda is `lambda_0`, reduced if the models point away from their initial model (mean cosine below `tau`).
    `take`: one of the two, or both. `compare_on="updates"`: cosines between updates, not whole models.
    """

    lambda_0: Annotated[Probability, OnlyWith("take", ("both",))] = 0.7
    # Paper: a "predefined threshold", never given. Here: 0.5, a guess.
    tau: Annotated[Positive, OnlyWith("take", ("both",))] = 0.5
    take: Similarity = "both"
    compare_on: Annotated[CompareOn, OnlyWith("take", ("both", "cosine"))] = "weights"
    bounded = True  # cosines and Gaussians lie in [-1, 1]

    def compare(self, models: Tree, ancestor: Tree) -> Tensor:
        """[m, m] of parameters stacked [m, ...]."""
        look = measure if self.compare_on == "weights" else measure_updates
        geometry = look(models, ancestor)
        return self.mix(geometry, range(len(geometry.movement)))[0]

    def mix(self, geometry: Geometry, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """([m, m] S of eq 10, the share lambda of the cosine in it) of clients `ids`."""
        if self.take == "gaussian":
            return gaussian(geometry), torch.zeros_like(geometry.movement[0])
        between, to_anchor = cosines(geometry, list(ids))
        if self.take == "cosine":
            return between, torch.ones_like(geometry.movement[0])
        share = self._lambda(to_anchor)
        return share * between + (1 - share) * gaussian(geometry), share

    def _lambda(self, to_anchor: Tensor) -> Tensor:
        """Eq (10)'s mixing share, reduced when clients point away from the global model.

        For updates, the reference is their mean, since the global model says nothing about how updates differ.
        """
        mean = to_anchor.mean()
        # Paper: lambda_0 * mean / tau, negative when clients oppose the model. Here: 0 then, since lambda is in [0, 1].
        return torch.where(mean < self.tau, self.lambda_0 * (mean / self.tau).clamp(min=0), self.lambda_0)


def gaussian(geometry: Geometry) -> Tensor:
    """exp(-d_ij^2 / 2 sigma^2) with sigma the mean distance over pairs (eqs 7, 8); all ones when all models agree."""
    m = len(geometry.distance)
    sigma = geometry.distance.sum() / (m * (m - 1))
    ratio = torch.where(sigma > 0, geometry.distance / sigma, 0.0)
    return torch.exp(-0.5 * ratio.square())
