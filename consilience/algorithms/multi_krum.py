"""Multi-Krum: the mean of replies with best scores."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, recipe
from consilience.algorithms._robust import robust
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count
from consilience.server.averaging.combining.krum import MultiKrum, Neighbours
from consilience.server.averaging.combining.tolerance import Faulty


@recipe
def multi_krum(
    *,
    f: Faulty = 0.2,
    keep: Count | None = None,
    neighbours: Neighbours = "n-f-1",
    mix: bool = False,
    **common: Unpack[Common],
) -> Algorithm:
    """Blanchard et al. 2017: w = the mean of the `keep` (n - f unless given) w_k that score best by Krum.

    f: faulty replies expected, a number or a share of the replies; n >= 2f + 3. With `mix`, nearest-neighbour mixing
    (Allouah et al. 2023) comes first.

    Use when: as Krum, with the mean of several replies.
    Not when: clients are heterogeneous: rare kinds of clients are dropped as outliers.
    """
    return robust(MultiKrum(f=f, keep=keep, neighbours=neighbours), f if mix else None, common)
