"""Centred clipping: bounds every client's update."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, recipe
from consilience.algorithms._robust import robust
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, Positive
from consilience.server.averaging.combining.centred_clipping import CentredClipping
from consilience.server.averaging.combining.tolerance import Faulty


@recipe
def centred_clipping(
    *, tau: Positive | None = None, iterations: Count = 1, mix: Faulty | None = None, **common: Unpack[Common]
) -> Algorithm:
    """Karimireddy et al. 2021: v <- v + mean_k (w_k - v) min(1, tau / |w_k - v|), from the broadcast model.

    `tau` defaults to the median of the |w_k - v|. With `mix`, nearest-neighbour mixing (Allouah et al. 2023) with
    that f comes first.

    Use when: some clients may send very large updates, which should be bounded rather than dropped.
    Not when: honest updates differ in size by orders of magnitude.
    """
    return robust(CentredClipping(tau=tau, iterations=iterations), mix, common)
