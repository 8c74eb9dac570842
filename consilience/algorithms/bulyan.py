"""Bulyan: repeated Krum, then a mean near the median."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, recipe
from consilience.algorithms._robust import robust
from consilience.core.algorithm import Algorithm
from consilience.server.averaging.combining.krum import Bulyan, Neighbours
from consilience.server.averaging.combining.tolerance import Faulty


@recipe
def bulyan(
    *, f: Faulty = 0.1, neighbours: Neighbours = "n-f-1", mix: bool = False, **common: Unpack[Common]
) -> Algorithm:
    """El Mhamdi et al. 2018: Krum picks n - 2f of the w_k; w = per coordinate, the mean of the n - 4f nearest to their
    median.

    f: faulty replies expected, a number or a share of the replies; n >= 4f + 3. With `mix`, nearest-neighbour mixing
    (Allouah et al. 2023) comes first.

    Use when: some clients may be malicious and each coordinate must be protected, with n >= 4f + 3.
    Not when: few clients reply, or honest clients differ strongly: many honest replies are then discarded.
    """
    return robust(Bulyan(f=f, neighbours=neighbours), f if mix else None, common)
