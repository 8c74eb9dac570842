"""Clustered averaging: one model per cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count
from consilience.server.rules.clustered import ClusteredAveraging
from consilience.server.rules.clusters import ClusterMetric, Groups


@recipe
def clustered_averaging(
    *, clusters: Count = 2, metric: ClusterMetric = "distance", groups: Groups | None = None, **common: Unpack[Common]
) -> Algorithm:
    """Eq 5 in El-Niss et al. 2024: w^cluster_k = 1/|C_k| sum_{i in C_k} w_i, sent back to the members of C_k alone.

    Clusters are formed once, from the updates of the first cohort (average linkage), or given as `groups`; the global
    model is the plain mean of the clusters' models.

    Use when: clients form a few groups with conflicting tasks, and each group may have its own model.
    Not when: one model must serve all, or the first cohort lacks some of the groups.
    Cost: the server keeps a model for each cluster and compares the pairs of the first cohort.
    """
    return replace(averaged(**common), server=ClusteredAveraging(clusters=clusters, metric=metric, groups=groups))
