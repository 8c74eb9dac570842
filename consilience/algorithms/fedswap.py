"""FedSwap: random model swaps between averages."""

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
    """Chiu et al. 2020: after h1 local steps models swap in random pairs, every h2-th time they are averaged instead.

    A step is `epochs` local epochs; a round is h1 steps and the swap or average after them. `training` replaces
    plain local training, by siamese for example.

    Use when: labels are skewed: a model that is passed on is trained on more of the data between averages.
    Not when: clients may not receive each other's models, or have similar label distributions.
    """
    # Paper: clients send each other their models. Here: through the server, because clients know the server alone; the
    # numbers are the same, the traffic is SimFedSwap's.
    return swapped(Random(), None, swap_percentage, h1, h2, training, **common)
