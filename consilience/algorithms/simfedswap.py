"""SimFedSwap: dissimilar models swap between averages."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, recipe
from consilience.algorithms._swapped import swapped
from consilience.client.training_variant import TrainingVariant
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, Invalid, Probability
from consilience.server.geometry.model_similarity import Layerwise, ModelSimilarity
from consilience.server.geometry.pairing import MinimumSimilarity, Pairing
from consilience.server.geometry.similarity import Metric


@recipe
def simfedswap(
    *,
    metric: Metric | None = None,
    similarity: Metric | ModelSimilarity | None = None,
    pairing: Pairing | None = None,
    swap_percentage: Probability = 1.0,
    h1: Count = 1,
    h2: Count = 3,
    training: TrainingVariant | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """Bozorgzad and Khorsandi: floor((m // 2) SP) pairs of dissimilar models swap, every h2-th time all are averaged.

    Similarity is the mean over layers of `metric` (default: cka_linear) between weight matrices, or `similarity`: also
    a metric's name, layerwise with its options, SimProx's gaussian_cosine, several mixed, or your own. `pairing` is
    minimum_similarity (MSS), greedy (GS), exact_matching or random; `training` replaces plain local training, by
    siamese for example. A step is `epochs` local epochs; a round is h1 steps and the swap or average after them: w =
    sum_k (N_k / N) w_k, N_k the rows of the client that holds w_k.

    Use when: as FedSwap, where pairs should be as dissimilar as possible.
    Not when: comparing all pairs of models is too expensive: in our runs random pairs (fedswap) did as well.
    """
    # Paper: a new Adam at every step. Here: at every round, which is h1 steps.
    if metric is not None and similarity is not None:
        raise Invalid(f"metric = {metric!r} and similarity both say how models are compared: give one of them")
    if isinstance(similarity, str):
        metric, similarity = similarity, None
    chosen = similarity or Layerwise(metric=metric or "cka_linear")
    return swapped(pairing or MinimumSimilarity(), chosen, swap_percentage, h1, h2, training, **common)
