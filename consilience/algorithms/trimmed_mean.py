"""The coordinate-wise trimmed mean."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, recipe
from consilience.algorithms._robust import robust
from consilience.core.algorithm import Algorithm
from consilience.server.averaging.combining.coordinate_wise import TrimmedMean
from consilience.server.averaging.combining.tolerance import Faulty


@recipe
def trimmed_mean(*, f: Faulty = 0.2, mix: bool = False, **common: Unpack[Common]) -> Algorithm:
    """Yin et al. 2018: of every coordinate, the mean of the w_k without the f smallest and the f largest.

    f: faulty replies expected, a number or a share of the replies; n >= 2f + 1. With `mix`, nearest-neighbour mixing
    (Allouah et al. 2023) comes first.

    Use when: at most a known share of the clients may be malicious.
    Not when: labels are skewed: updates for rare classes are trimmed.
    """
    return robust(TrimmedMean(f=f), f if mix else None, common)
