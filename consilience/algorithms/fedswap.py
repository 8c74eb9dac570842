"""FedSwap: clients exchange models at random between averages."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, recipe
from consilience.algorithms._swapped import swapped
from consilience.client.training_variant import TrainingVariant
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, Probability
from consilience.server.geometry.pairing import Random


@recipe
def fedswap(
    *,
    swap_percentage: Probability = 1.0,
    h1: Count = 1,
    h2: Count = 3,
    training: TrainingVariant | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """Chiu et al. 2020: after h1 local steps models swap in random pairs, after every h2-th time they are averaged.

    A step is `epochs` local epochs; a round is h1 of them and what ends them. `training` is another way to train than
    plain local training, such as siamese.

    Use when: labels are skewed and models may travel: each then sees more of the data between averages.
    Not when: clients may not receive each other's models, or labels are alike.
    """
    # Paper: clients send each other their models. Here: through the server, because clients know the server alone; the
    # numbers are the same, the traffic is SimFedSwap's.
    return swapped(Random(), None, swap_percentage, h1, h2, training, **common)
