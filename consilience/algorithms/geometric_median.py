"""RFA: the geometric median of the clients' models."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, recipe
from consilience.algorithms._robust import robust
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Positive
from consilience.server.averaging.combining.geometric_median import GeometricMedian
from consilience.server.averaging.combining.tolerance import Faulty


@recipe
def geometric_median(*, nu: Positive = 1e-6, mix: Faulty | None = None, **common: Unpack[Common]) -> Algorithm:
    """Pillutla et al. 2022 (RFA): w = argmin_v sum_k |w_k - v|, by the smoothed Weiszfeld iteration.

    `weighting="by_examples"` gives the paper's sum_k (N_k / N) |w_k - v|. With `mix`, nearest-neighbour mixing
    (Allouah et al. 2023) with that f comes first.

    Use when: fewer than half of the clients may be malicious, and a smooth rule on whole models is wanted.
    Not when: labels are skewed and all clients are honest: it favours the majority.
    """
    # Paper: weights N_k / N. Here: equal ones by default, because a client could claim any N_k.
    return robust(GeometricMedian(nu=nu), mix, common)
