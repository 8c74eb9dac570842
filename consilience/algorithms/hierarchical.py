"""Hierarchical FedAvg: clients, edge servers, cloud."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, Whole
from consilience.server.averaging.averaging import Averaging
from consilience.server.rules.edge_cloud import EdgeCloud


@recipe
def hierarchical(
    *,
    edges: Count = 2,
    cloud_every: Count = 2,
    edge_of: tuple[Whole, ...] | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """Liu et al. 2020: w_e = mean of edge e's clients in every round, w = mean of the edges every `cloud_every` rounds.

    The paper's kappa_1 is the local work of a round (`epochs`), its kappa_2 is `cloud_every`. Bytes count what passes
    between clients and edges; the edges' own traffic is 2 x `edges` models every `cloud_every` rounds.

    Use when: clients have a cheap link to an edge server, and the link to the cloud is expensive.
    Not when: clients of an edge are similar and edges differ: edges then drift apart between two averages in the cloud.
    Cost: the server keeps a model for every edge.
    """
    usual = averaged(**common)
    assert isinstance(usual.server, Averaging)
    server = EdgeCloud(averaging=usual.server, edges=edges, cloud_every=cloud_every, edge_of=edge_of)
    return replace(usual, server=server)
