"""Krum: the reply closest to its nearest neighbours."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, recipe
from consilience.algorithms._robust import robust
from consilience.core.algorithm import Algorithm
from consilience.server.averaging.combining.krum import Krum, Neighbours
from consilience.server.averaging.combining.tolerance import Faulty


@recipe
def krum(
    *, f: Faulty = 0.2, neighbours: Neighbours = "n-f-1", mix: bool = False, **common: Unpack[Common]
) -> Algorithm:
    """Blanchard et al. 2017: w = the w_k with the least sum of squared distances to its nearest others.

    f: faulty replies expected, a number or a share of the replies; n >= 2f + 3. `neighbours="n-f-2"` counts as the
    paper does. With `mix`, nearest-neighbour mixing (Allouah et al. 2023) comes first.

    Use when: a few clients may be malicious, and one honest model is better than a corrupted mean.
    Not when: clients are heterogeneous: it keeps one client's model and drops the rest.
    """
    return robust(Krum(f=f, neighbours=neighbours), f if mix else None, common)
