"""All data in one place: the ceiling that federated learning is measured against."""

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
    optimiser's state starts afresh every round, as everywhere.

    Use when: you want to know what the same model and solver could reach if the data could be moved.
    Not when: they cannot; this is no federated method.
    """
    common.setdefault("selection", Pooled())
    return averaged(**common)
