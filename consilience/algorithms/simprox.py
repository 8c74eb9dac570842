"""SimProx: weights by model similarity and distance."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.memory.models import PreviousModel
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, Positive, Probability
from consilience.selection.sliding_window import SlidingWindow
from consilience.server.averaging.weighting.simprox import Previous, SimProxWeights
from consilience.server.geometry.gaussian_cosine import CompareOn, Similarity
from consilience.server.geometry.model_similarity import ModelSimilarity
from consilience.server.geometry.similarity import Metric
from consilience.server.protocols import read_by


@recipe
def simprox(
    *,
    lambda_0: Probability = 0.7,
    tau: Positive = 0.5,
    softmax: bool = True,
    temperature: Positive | None = None,
    previous_model: Previous = "global",
    scaled_norms: bool = False,
    similarity: Similarity | Metric | ModelSimilarity = "both",
    compare_on: CompareOn = "weights",
    sketch: Count | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """El-Niss et al. 2024: alpha_i ~ exp(-|w_i - w|) (1 + mean_j S_ij), S = lambda cosine + (1 - lambda) Gaussian.

    30 % of the clients a round, by a sliding window over a shuffled list. Local training is plain SGD: "proximal" is
    only the factor exp(-g) in the weights. The options are those of `SimProxWeights`: `similarity` also takes
    SimFedSwap's similarities (layerwise CKA, CCA, ..., mixed, or your own), and with `previous_model="own"` each client
    keeps its last model and reports its distance from it.

    Use when: some clients may diverge, and the server may see every model.
    Not when: the server may see only sums, or updates are small (weights are then within a few per cent of uniform).
    Cost: the server compares all pairs, O(m^2 P), or O(m P + m^2 k) with a sketch of k numbers.
    """
    weights = SimProxWeights(
        lambda_0=lambda_0,
        tau=tau,
        softmax=softmax,
        temperature=temperature,
        previous_model=previous_model,
        scaled_norms=scaled_norms,
        similarity=similarity,
        compare_on=compare_on,
        sketch=sketch,
    )
    common.setdefault("selection", SlidingWindow(fraction=0.3))
    weighting = common.setdefault("weighting", weights)
    if "moved" in read_by(weighting):
        others = [part for part in common.get("memory", ()) if not isinstance(part, PreviousModel)]
        common["memory"] = (*others, PreviousModel(report=True))
    return averaged(**common)
