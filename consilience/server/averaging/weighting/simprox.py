"""SimProx: weights from Gaussian + cosine similarity and from update norms (El-Niss et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.rng import key
from consilience.core.settings import Count, Invalid, OnlyWith, Positive, Probability, check, check_value
from consilience.core.tree import Tree
from consilience.server.geometry.gaussian_cosine import CompareOn, GaussianCosine, Similarity
from consilience.server.geometry.geometry import Geometry, measure, measure_updates
from consilience.server.geometry.model_similarity import Bounded, Layerwise, ModelSimilarity
from consilience.server.geometry.similarity import METRICS, Metric

Previous = Literal["global", "own"]
OWN = ("both", "cosine", "gaussian")  # SimProx's own similarities
RANGE = (
    "in [-1, 1]: put it inside Mixed(parts=(...,), normalise='range'), in a config "
    "{name = 'mixed', parts = [...], normalise = 'range'}, which takes the pairs of a round to [0, 1]"
)


@dataclass(frozen=True, kw_only=True)
class SimProxWeights:
    """alpha_i ~ exp(-g_i) (1 + mean_{j != i} S_ij), then a softmax; S mixes cosine (share lambda) and Gaussian.

    Only trainable parameters are compared; example counts are ignored. The softmax (eq 14) keeps every weight
    within a factor e of any other; `softmax=False` stops at the normalised alpha (eq 13), `temperature` T takes
    alpha^(1/T), normalised, instead: 1 is alpha, less is sharper, more is flatter. The other options:
    `previous_model="own"`: g_i is the distance from the client's own last model, which it reports
    (`PreviousModel(report=True)`).
    `scaled_norms`: g_i is divided by the square root of the number of parameters.
    `similarity`: one of the two measures alone, or as S any other similarity of models with values in [-1, 1]; the name
    of a metric, such as "cka_linear", is its mean over the layers.
    `compare_on="updates"`: cosines between updates, not whole models.
    `sketch`: compare random projections of this length (see `sketching.sketch` for the error).
    """

    lambda_0: Annotated[Probability, OnlyWith("similarity", ("both",))] = 0.7
    # Paper: a "predefined threshold", never given. Here: 0.5, a guess.
    tau: Annotated[Positive, OnlyWith("similarity", ("both",))] = 0.5
    softmax: Annotated[bool, OnlyWith("temperature", (None,))] = True
    temperature: Positive | None = None
    previous_model: Previous = "global"
    scaled_norms: bool = False
    similarity: Similarity | Metric | ModelSimilarity = "both"
    compare_on: Annotated[CompareOn, OnlyWith("similarity", OWN)] = "weights"
    sketch: Annotated[Count | None, OnlyWith("similarity", OWN)] = None
    needs_each_reply = True  # similarities need every model

    def __post_init__(self) -> None:
        check(self)
        if self.similarity in METRICS:  # shorthand for a mean over the layers
            object.__setattr__(self, "similarity", Layerwise(metric=self.similarity))  # type: ignore[arg-type]
        if not isinstance(self.similarity, ModelSimilarity):
            check_value("SimProxWeights.similarity", self.similarity, Similarity)
        if isinstance(self.similarity, Bounded) and not self.similarity.bounded:
            raise Invalid(f"SimProxWeights.similarity = {self.similarity!r} must have values {RANGE}")

    @property
    def reads(self) -> tuple[str, ...]:
        """Entries that clients must add to their replies."""
        return ("moved",) if self.previous_model == "own" else ()

    def init(self, start: Tree, clients: int) -> Tree:
        """No state."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """Weights of this round's models around the broadcast one."""
        if len(cohort) == 1:
            return torch.ones_like(cohort.examples), state, {}
        models, anchor = cohort.reply["model"]["params"], model["params"]
        look = measure if self.compare_on == "weights" else measure_updates
        draw = key(0, "simprox", cohort.round)  # a new sketch in every round, so that no pair is wrong in all of them
        geometry = look(models, anchor, directions=self.sketch, key=draw)
        if isinstance(self.similarity, str):
            similarity, share = self._own(self.similarity).mix(geometry, cohort.ids.tolist())
            notes: Notes = {"similarity": similarity, "lambda": share}
        else:
            similarity = _within_one(self.similarity.compare(models, anchor), self.similarity)
            notes = {"similarity": similarity}
        movement = self._movement(geometry, cohort, model)
        weights = self._weights(similarity.to(movement.device), movement)
        agree = geometry.distance.sum() == 0  # equal models have bit-identical weights
        weights = torch.where(agree, 1 / len(cohort), weights)
        notes |= {"movement": movement, "all_alike": agree, "zero_updates": (geometry.movement == 0).sum()}
        return weights.to(cohort.examples.device), state, notes

    def _own(self, take: Similarity | Metric) -> GaussianCosine:
        """SimProx's own similarity (metrics have become `Layerwise`); `compare_on` was applied when measuring."""
        if take == "both":
            return GaussianCosine(lambda_0=self.lambda_0, tau=self.tau)
        return GaussianCosine(take=take)  # type: ignore[arg-type]

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
            if cohort.heard is not None:  # a missing reply is replaced by the broadcast model, which has not moved
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


def _within_one(similarity: Tensor, source: ModelSimilarity) -> Tensor:
    """The values unchanged; refused if 1 + S of eq (12) could be negative."""
    others = ~torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
    values = similarity[others]
    if not bool((values.abs() <= 1 + 1e-9).all()):  # NaN is refused, too
        raise Invalid(
            f"{type(source).__name__} gave similarities from {float(values.min()):g} to {float(values.max()):g}, and "
            f"SimProx's weights, exp(-g) (1 + S), need them {RANGE}"
        )
    return similarity
