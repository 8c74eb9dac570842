"""SimProx: weigh clients by Gaussian + cosine similarity and by how far they moved (El-Niss et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.rng import key
from consilience.core.settings import Count, Invalid, OnlyWith, Positive, Probability, check
from consilience.core.tree import Tree
from consilience.server.geometry.geometry import Geometry, cosines, measure, measure_updates

Previous = Literal["global", "own"]
Similarity = Literal["both", "cosine", "gaussian"]
CompareOn = Literal["weights", "updates"]


@dataclass(frozen=True, kw_only=True)
class SimProxWeights:
    """alpha_i ~ exp(-g_i) (1 + mean_{j != i} S_ij), then a softmax; S mixes cosine (share lambda) and Gaussian.

    Only learnable parameters are compared, and example counts play no part. The softmax (eq 14) keeps every weight
    within a factor e of any other; `softmax=False` stops at the normalised alpha (eq 13), `temperature` T takes
    alpha^(1/T), normalised, instead: 1 is alpha, less is sharper, more is flatter. The other options:
    `previous_model="own"`: g_i is the distance from the client's own last model, which it reports
    (`PreviousModel(report=True)`).
    `scaled_norms`: g_i is divided by the square root of the number of parameters.
    `similarity`: one of the two measures alone. `compare_on="updates"`: cosines between updates, not whole models.
    `sketch`: compare random projections of this length (see `sketching.sketch` for the error).
    """

    lambda_0: Annotated[Probability, OnlyWith("similarity", ("both",))] = 0.7
    # Paper: a "predefined threshold", never given. Here: 0.5, a guess.
    tau: Annotated[Positive, OnlyWith("similarity", ("both",))] = 0.5
    softmax: Annotated[bool, OnlyWith("temperature", (None,))] = True
    temperature: Positive | None = None
    previous_model: Previous = "global"
    scaled_norms: bool = False
    similarity: Similarity = "both"
    compare_on: CompareOn = "weights"
    sketch: Count | None = None

    def __post_init__(self) -> None:
        check(self)

    @property
    def needs_each_reply(self) -> bool:
        """Similarities need every model."""
        return True

    @property
    def reads(self) -> tuple[str, ...]:
        """What clients must add to their replies."""
        return ("moved",) if self.previous_model == "own" else ()

    def init(self, start: Tree, clients: int) -> Tree:
        """No state."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """Weights of this round's models around the broadcast one."""
        if len(cohort) == 1:
            return torch.ones_like(cohort.examples), state, {}
        look = measure if self.compare_on == "weights" else measure_updates
        draw = key(0, "simprox", cohort.round)  # a pair that a sketch has bad luck with has it once
        geometry = look(cohort.reply["model"]["params"], model["params"], directions=self.sketch, key=draw)
        similarity, share = self._similarity(geometry, cohort)
        movement = self._movement(geometry, cohort, model)
        weights = self._weights(similarity, movement)
        agree = geometry.distance.sum() == 0  # equal models weigh the same, to the last bit
        weights = torch.where(agree, 1 / len(cohort), weights)
        notes = {"similarity": similarity, "lambda": share, "movement": movement, "all_alike": agree}
        notes["zero_updates"] = (geometry.movement == 0).sum()
        return weights.to(cohort.examples.device), state, notes

    def _similarity(self, geometry: Geometry, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """([m, m] S of eq 10, the share lambda of the cosine in it)."""
        if self.similarity == "gaussian":
            return gaussian(geometry), torch.zeros_like(geometry.movement[0])
        between, to_anchor = cosines(geometry, cohort.ids.tolist())
        if self.similarity == "cosine":
            return between, torch.ones_like(geometry.movement[0])
        share = self._lambda(to_anchor)
        return share * between + (1 - share) * gaussian(geometry), share

    def _lambda(self, to_anchor: Tensor) -> Tensor:
        """Eq (10)'s mixing share, reduced when clients point away from the global model.

        Of updates: from their mean, which is the way the global model would go, since the global model itself says
        nothing of how updates differ.
        """
        mean = to_anchor.mean()
        # Paper: lambda_0 * mean / tau, negative when clients oppose the model. Here: 0 then, since lambda is in [0, 1].
        return torch.where(mean < self.tau, self.lambda_0 * (mean / self.tau).clamp(min=0), self.lambda_0)

    def _movement(self, geometry: Geometry, cohort: Cohort, model: Tree) -> Tensor:
        """[m] g of eq 11."""
        movement = geometry.movement
        if self.previous_model == "own":
            if "moved" not in cohort.reply:
                raise Invalid(
                    "SimProxWeights(previous_model='own') needs to know how far clients moved from their own last "
                    "models: give them the memory PreviousModel(report=True), as the recipe does"
                )
            movement = cohort.reply["moved"].to(movement)
            if cohort.heard is not None:  # who was not heard reported nothing: the broadcast model stands in, unmoved
                movement = torch.where(torch.from_numpy(cohort.heard).to(movement.device), movement, geometry.movement)
        if self.scaled_norms:
            movement = movement / sum(leaf.numel() for leaf in model["params"].values()) ** 0.5
        return movement

    def _weights(self, similarity: Tensor, movement: Tensor) -> Tensor:
        m = len(similarity)
        typical = (similarity.sum(1) - similarity.diagonal()) / (m - 1)
        # Paper: exp(-g) (...) normalised, which is 0/0 once g exceeds 745. Here: the same number in the log domain.
        log_alpha = (1 + typical).clamp(min=1e-300).log() - movement
        if self.temperature is not None:
            return torch.softmax((log_alpha - log_alpha.amax()) / self.temperature, 0)
        alpha = torch.softmax(log_alpha, 0)
        return torch.softmax(alpha, 0) if self.softmax else alpha


def gaussian(geometry: Geometry) -> Tensor:
    """exp(-d_ij^2 / 2 sigma^2) with sigma the mean distance over pairs (eqs 7, 8); all ones when all models agree."""
    m = len(geometry.distance)
    sigma = geometry.distance.sum() / (m * (m - 1))
    ratio = torch.where(sigma > 0, geometry.distance / sigma, 0.0)
    return torch.exp(-0.5 * ratio.square())
