"""FedAdp: weights by angle to the mean gradient."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Positive
from consilience.server.averaging.weighting.fedadp import FedAdpWeights


@recipe
def fedadp(*, beta: Positive = 7.0, **common: Unpack[Common]) -> Algorithm:
    """Wu and Wang 2021: weights ~ N_k exp(h(a_k)), a_k the smoothed angle between client k's gradient and the mean's.

    h(a) = beta (1 - exp(-exp(-beta (a - 1)))).

    Use when: most updates agree and a few point in other directions.
    Not when: the clients that differ have classes or features that the others lack.
    Cost: FedAvg's; one angle per client at the server.
    """
    common.setdefault("weighting", FedAdpWeights(beta=beta))
    return averaged(**common)
