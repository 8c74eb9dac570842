"""IFCA: clients choose the cluster model that fits."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.choosing_training import ChoosingTraining
from consilience.client.local_training import LocalTraining
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, Whole
from consilience.server.averaging.averaging import Averaging
from consilience.server.rules.chosen_clusters import ChosenClusters


@recipe
def ifca(*, clusters: Count = 2, cluster_seed: Whole = 0, **common: Unpack[Common]) -> Algorithm:
    """Ghosh et al. 2020: client k trains w_j with j = argmin_j F_k(w_j); each w_j is averaged over those who chose it.

    F_k is taken over all of the client's rows, in a pass before training. The clusters' models start from the initial
    one with its values shuffled (`cluster_seed`). The largest cluster's model is evaluated as the global one:
    evaluate the clients' own models, too.

    Use when: clients form a known number of groups that need different outputs for the same input.
    Not when: clients differ gradually, groups have few rows, or bandwidth is scarce (every client gets all models).
    Cost: one more pass over the rows for every model.
    """
    usual = averaged(**common)
    assert isinstance(usual.client, LocalTraining) and isinstance(usual.server, Averaging)
    return Algorithm(
        selection=usual.selection,
        client=ChoosingTraining(training=usual.client),
        server=ChosenClusters(averaging=usual.server, clusters=clusters, seed=cluster_seed),
        channel=usual.channel,
    )
