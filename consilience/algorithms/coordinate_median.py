"""The coordinate-wise median."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, recipe
from consilience.algorithms._robust import robust
from consilience.core.algorithm import Algorithm
from consilience.server.averaging.combining.coordinate_wise import Median
from consilience.server.averaging.combining.tolerance import Faulty


@recipe
def coordinate_median(*, mix: Faulty | None = None, **common: Unpack[Common]) -> Algorithm:
    """Yin et al. 2018: w = the median of the w_k, coordinate by coordinate.

    Needs no f. With `mix`, nearest-neighbour mixing (Allouah et al. 2023) with that f comes first.

    Use when: fewer than half of the clients may be malicious, and their number is unknown.
    Not when: labels are skewed: the median of heterogeneous models fits no client.
    """
    return robust(Median(), mix, common)
