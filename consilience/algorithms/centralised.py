"""Upper baseline: training on the pooled data."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.selection.everyone import Pooled


@recipe
def centralised(**common: Unpack[Common]) -> Algorithm:
    """No paper: plain training on the rows of all clients; a round is `epochs` passes over all of them.

    `consilience run` and `train` pool the federation for it; elsewhere give the engine `federation.pooled()`. A round
    has as many steps as all clients of FedAvg do together, one after the other: equal rounds are equal work. The
    optimiser's state is reset every round, as in every recipe.

    Use when: you need an upper baseline: what the same model and solver reach on pooled data.
    Not when: data may not be moved: this is not a federated method.
    """
    common.setdefault("selection", Pooled())
    return averaged(**common)
