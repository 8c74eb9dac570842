"""Agglomerative clustering of a cohort, and predefined groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from consilience.core import tree
from consilience.core.exchange import Cohort
from consilience.core.settings import Invalid, Whole
from consilience.core.tree import Tree
from consilience.server.geometry.geometry import measure_updates

Groups = tuple[tuple[Whole, ...], ...]
"""Client numbers, group by group."""
ClusterMetric = Literal["distance", "direction"]
"""distance: |w_i - w_j|; direction: 1 - cosine of the updates."""


def agglomerate(distance: np.ndarray, clusters: int) -> np.ndarray:
    """[m] cluster numbers 0, 1, ...: merge the two nearest (mean distance over pairs) until `clusters` are left.

    Models at distance zero are never separated. Clusters are numbered by their first member; ties go to the first pair
    (which SciPy's `linkage` does not promise, so that results would depend on its version).
    """
    members = [[k] for k in range(len(distance))]
    between = (distance + distance.T) / 2  # symmetric to the last bit, so that of the first nearest pair one < other
    np.fill_diagonal(between, np.inf)
    while len(members) > max(1, clusters) or between.min() == 0:
        one, other = divmod(int(between.argmin()), len(between))
        sizes = len(members[one]), len(members[other])
        joined = (sizes[0] * between[one] + sizes[1] * between[other]) / sum(sizes)
        between[one] = between[:, one] = joined
        between[one, one] = np.inf
        between = np.delete(np.delete(between, other, 0), other, 1)
        members[one] = members[one] + members.pop(other)
    labels = np.empty(len(distance), dtype=np.int64)
    for number, cluster in enumerate(sorted(members, key=min)):
        labels[cluster] = number
    return labels


def by_similarity(cohort: Cohort, params: Tree, clusters: int, metric: ClusterMetric) -> np.ndarray:
    """[m] cluster numbers of a cohort in ascending client order, from its models relative to `params`."""
    geometry = measure_updates(cohort.reply["model"]["params"], params)
    apart = geometry.distance if metric == "distance" else (1 - geometry.cosine).masked_fill(geometry.distance == 0, 0)
    return agglomerate(apart.cpu().numpy(), clusters)


def in_order(cohort: Cohort) -> Cohort:
    """The cohort in ascending client order."""
    order = np.argsort(cohort.ids)
    index = torch.from_numpy(order)
    return replace(
        cohort,
        reply=tree.map_leaves(lambda leaf: leaf[index.to(leaf.device)], cohort.reply),
        ids=cohort.ids[order],
        examples=cohort.examples[index.to(cohort.examples.device)],
        steps=cohort.steps[order],
        heard=None if cohort.heard is None else cohort.heard[order],
    )


def check_groups(groups: Groups, clients: int, key: str) -> np.ndarray:
    """[K] every client's group; refuses groups that are empty, overlap or do not cover all clients."""
    owner = np.full(clients, -1)
    for number, group in enumerate(groups):
        if not group:
            raise Invalid(f"{key}[{number}] is empty: leave it out")
        for client in group:
            if client >= clients:
                raise Invalid(f"{key}[{number}] names client {client}, but there are {clients} (0 to {clients - 1})")
            if owner[client] >= 0:
                raise Invalid(f"{key} names client {client} twice: in group {owner[client]} and in group {number}")
            owner[client] = number
    if (owner < 0).any():
        raise Invalid(f"{key} leaves out client {int(np.argmin(owner))}: put every client into a group")
    return owner
