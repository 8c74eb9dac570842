"""Clustered FL: clusters by direction of updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, NonNegative, Probability, Whole
from consilience.server.averaging.averaging import Averaging
from consilience.server.rules.bipartition import Bipartition


@recipe
def clustered_fl(
    *,
    eps_1: NonNegative = 0.4,
    eps_2: NonNegative = 1.6,
    gamma: Probability = 0.0,
    warm_up: Whole = 20,
    max_clusters: Count = 8,
    **common: Unpack[Common],
) -> Algorithm:
    """Sattler et al. 2020: FedAvg in each cluster, split in two when |mean update| < eps_1 while max |update| > eps_2.

    The split minimises a, the largest cosine similarity between updates of its two parts, and is rejected unless
    sqrt((1 - a) / 2) > gamma. Both parts continue from the same model. `eps_1`, `eps_2` and `warm_up` are those of the
    authors' code and depend on model and learning rate. A cluster is split only in a round in which all its clients
    reply. The largest cluster's model is evaluated as the global one: evaluate the clients' own models, too.

    Use when: clients form groups with conflicting tasks, and the number of groups is unknown.
    Not when: few clients take part in a round, or updates differ by noise alone; the thresholds need tuning.
    Cost: the server compares all pairs of a cluster, O(m^2 P), and keeps `max_clusters` models.
    """
    usual = averaged(**common)
    assert isinstance(usual.server, Averaging)
    server = Bipartition(
        averaging=usual.server, eps_1=eps_1, eps_2=eps_2, gamma=gamma, warm_up=warm_up, max_clusters=max_clusters
    )
    return replace(usual, server=server)
