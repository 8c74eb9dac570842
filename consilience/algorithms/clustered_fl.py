"""Clustered federated learning: clients are told apart by the directions in which they pull."""

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
    """Sattler et al. 2020: FedAvg in a cluster, cut in two when |mean update| < eps_1 while max |update| > eps_2.

    The cut minimises the largest cosine similarity of updates across it; it is refused unless sqrt((1 - a) / 2) > gamma
    for that similarity a. Both parts go on from the same model. `eps_1`, `eps_2` and `warm_up` are those of the
    authors' code and depend on model and learning rate. A cluster is only cut in a round in which all its clients
    reply. The model that is tested is that of the largest cluster: judge the clients' own ones, too.

    Use when: clients fall into kinds that contradict each other, and you do not know how many.
    Not when: few clients take part in a round, or updates differ by noise alone; the thresholds need tuning.
    Cost: the server compares all pairs of a cluster, O(m^2 P), and keeps `max_clusters` models.
    """
    usual = averaged(**common)
    assert isinstance(usual.server, Averaging)
    server = Bipartition(
        averaging=usual.server, eps_1=eps_1, eps_2=eps_2, gamma=gamma, warm_up=warm_up, max_clusters=max_clusters
    )
    return replace(usual, server=server)
