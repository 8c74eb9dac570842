"""Clustered federated learning: a cluster with conflicting updates is split in two (Sattler et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.capabilities import Wraps
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Count, NonNegative, Probability, Whole
from consilience.core.tree import Tree
from consilience.server.averaging.averaging import Averaging
from consilience.server.rules.grouping import UNGROUPED, largest, open_groups, update_groups


@dataclass(frozen=True, kw_only=True)
class Bipartition(Wraps):
    """Clients train and average within their cluster; all start in one. A cluster is split in two if its mean update is
    shorter than `eps_1` while some client's update is longer than `eps_2`: it has converged, but its clients have not.

    The split minimises a, the largest cosine between updates of the two sides; it is made only if
    sqrt((1 - a) / 2) > `gamma`, after the first `warm_up` rounds, and while there are fewer than `max_clusters`.
    """

    averaging: Averaging = field(default_factory=Averaging)
    eps_1: NonNegative = 0.4
    eps_2: NonNegative = 1.6
    gamma: Probability = 0.0
    warm_up: Whole = 20
    max_clusters: Count = 8
    holds = "averaging"
    refuses = UNGROUPED
    needs_each_reply = True  # it compares updates

    def init(self, start: Tree, clients: int) -> Tree:
        """All clients in cluster 0; the other clusters hold the initial model."""
        device = next(tree.leaves(start)).device
        return {
            "groups": open_groups(self.averaging, [start] * self.max_clusters, clients),
            "cluster": torch.zeros(clients, dtype=torch.int64, device=device),
            "count": torch.ones((), dtype=torch.int64, device=device),
            "known": torch.zeros(clients, dtype=torch.bool, device=device),  # clients that have ever replied
        }

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """Each client's cluster model."""
        mine = state["cluster"][torch.from_numpy(ids).to(state["cluster"].device)]
        return Broadcast(shared={}, personal={"model": tree.rows(state["groups"]["model"], mine)})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """Split clusters where necessary, then average within each cluster."""
        where = torch.from_numpy(cohort.ids).to(state["cluster"].device)
        known = state["known"].index_fill(0, where, True)
        before = state["cluster"].cpu().numpy()
        count, cluster, groups = int(state["count"]), before.copy(), state["groups"]
        if cohort.round >= self.warm_up:
            updates = _updates(cohort, tree.rows(groups["model"]["params"], state["cluster"][where]))
            for place in range(int(state["count"])):
                apart = self._cut(cohort, updates, before == place, known.cpu().numpy())
                if len(apart) and count < self.max_clusters:
                    cluster[apart] = count
                    groups = tree.map_leaves(lambda leaf, a=place, b=count: _copied(leaf, a, b), groups)
                    count += 1
        groups, weights = update_groups(self.averaging, groups, cohort, cluster[cohort.ids])
        clusters = torch.from_numpy(cluster).to(state["cluster"].device)
        after = {"groups": groups, "cluster": clusters, "count": torch.full_like(state["count"], count), "known": known}
        return after, {"weights": weights, "cluster": clusters[where], "clusters": after["count"]}

    def model(self, state: Tree) -> Tree:
        """The model of the largest cluster."""
        return tree.rows(state["groups"]["model"], largest(state["cluster"], self.max_clusters))

    def _cut(self, cohort: Cohort, updates: Tensor, members: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Ids that leave a cluster; none if it is not split."""
        here = members[cohort.ids]
        heard = here if cohort.heard is None else here & cohort.heard
        # Paper: everyone takes part in every round. Here: a cluster is split only when all its known clients replied.
        if heard.sum() < max(2, (members & known).sum()):
            return np.empty(0, dtype=np.int64)
        places = np.flatnonzero(here)
        places = places[np.argsort(cohort.ids[places])]  # the first client's side keeps the cluster's number
        mine = updates[torch.from_numpy(places).to(updates.device)]  # [c, P]
        rows = cohort.examples[torch.from_numpy(places).to(cohort.examples.device)]
        mean = (rows / rows.sum()) @ mine
        lengths = torch.linalg.vector_norm(mine, dim=1)
        if not (float(torch.linalg.vector_norm(mean)) < self.eps_1 and float(lengths.max()) > self.eps_2):
            return np.empty(0, dtype=np.int64)
        similarity = cosine_similarity(mine).cpu().numpy()
        side = bipartition(similarity)
        across = similarity[np.ix_(side, ~side)].max()
        if not np.sqrt((1 - across) / 2) > self.gamma:
            return np.empty(0, dtype=np.int64)
        return cohort.ids[places][~side]


def cosine_similarity(updates: Tensor) -> Tensor:
    """[c, c] cosines between rows of [c, P]; a zero update has cosine 0 to all others."""
    largest_entry = updates.abs().amax(1, keepdim=True)
    scaled = updates / torch.where(largest_entry > 0, largest_entry, 1.0)  # squares cannot overflow
    lengths = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    unit = scaled / torch.where(lengths > 0, lengths, 1.0)
    return (unit @ unit.T).clamp(-1, 1)


def bipartition(similarity: np.ndarray) -> np.ndarray:
    """[c] flags: the two sides between which the largest similarity is least; True is the first client's side.

    The most similar pairs are joined first, until two groups are left (the paper's algorithm 1: single linkage, in an
    order of ties that does not depend on a library's version).
    """
    count = len(similarity)
    group = np.arange(count)
    first, second = np.triu_indices(count, 1)
    order = np.argsort(-similarity[first, second], kind="stable")
    groups = count
    for one, other in zip(first[order], second[order]):
        if groups == 2:
            break
        if group[one] != group[other]:
            group[group == group[other]] = group[one]
            groups -= 1
    return group == group[0]


def _updates(cohort: Cohort, started: Tree) -> Tensor:
    """[m, P] float64: how far each client moved its parameters."""
    ends = cohort.reply["model"]["params"]
    if cohort.received is not None:
        started = cohort.received.personal["model"]["params"]
    parts = [(end.to(torch.float64) - started[name].to(torch.float64)).flatten(1) for name, end in ends.items()]
    return torch.cat(parts, 1)


def _copied(leaf: Tensor, source: int, target: int) -> Tensor:
    """[G, ...] with one row copied to another."""
    where = torch.tensor([target], device=leaf.device)
    return leaf.index_copy(0, where, leaf[source : source + 1])
