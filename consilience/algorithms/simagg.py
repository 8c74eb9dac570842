"""SimAgg: weights per tensor by distance to the mean."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Positive
from consilience.selection.sliding_window import SlidingWindow
from consilience.server.averaging.combining.simagg import SimAgg


@recipe
def simagg(*, eps: Positive = 1e-5, **common: Unpack[Common]) -> Algorithm:
    """Khan et al. 2021: per tensor p, share_k ~ u_k + v_k with u_k ~ 1 / (|p_k - mean p|_1 + eps) and v_k = N_k / N.

    u and v each sum to one. 20 % of the clients a round, by a sliding window over a shuffled list.

    Use when: a few clients are outliers in some layers, and example counts should still matter.
    Not when: the server may see only sums.
    Cost: O(m P) at the server.
    """
    common.setdefault("selection", SlidingWindow(fraction=0.2))
    common.setdefault("combine", SimAgg(eps=eps))
    return averaged(**common)
