"""SimProx: the server weighs clients by similarity and by how far they moved."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged
from consilience.core.algorithm import Algorithm
from consilience.core.checks import Positive, Probability
from consilience.selection.sliding_window import SlidingWindow
from consilience.server.weighting.simprox import SimProxWeights


def simprox(
    *, lambda_0: Probability = 0.7, tau: Positive = 0.5, softmax: bool = True, **common: Unpack[Common]
) -> Algorithm:
    """El-Niss et al. 2024: alpha_i ~ exp(-|w_i - w|) (1 + mean_j S_ij), S = lambda cosine + (1 - lambda) Gaussian.

    30 % of the clients a round, by a sliding window over a shuffled list. Local training is plain SGD: "proximal" is
    only the factor exp(-g) in the weights.
    """
    common.setdefault("selection", SlidingWindow(fraction=0.3))
    common.setdefault("weighting", SimProxWeights(lambda_0=lambda_0, tau=tau, softmax=softmax))
    return averaged(**common)
