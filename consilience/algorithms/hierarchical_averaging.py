"""Hierarchical averaging: equal weight per cluster."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count
from consilience.server.averaging.weighting.hierarchical import HierarchicalWeights
from consilience.server.rules.clusters import ClusterMetric, Groups


@recipe
def hierarchical_averaging(
    *, clusters: Count = 2, metric: ClusterMetric = "distance", groups: Groups | None = None, **common: Unpack[Common]
) -> Algorithm:
    """Eqs 5 and 6 in El-Niss et al. 2024, after Briggs et al. 2020: w = 1/M sum_k (1/|C_k| sum_{i in C_k} w_i).

    The clusters are computed in every round from the updates (average linkage), or given as `groups`.

    Use when: a large group of similar clients should not dominate a small one.
    Not when: small clusters may be noise or attackers: each cluster has the same weight.
    Cost: the server compares all pairs, O(m^2 P); nothing with `groups`.
    """
    common.setdefault("weighting", HierarchicalWeights(clusters=clusters, metric=metric, groups=groups))
    return averaged(**common)
