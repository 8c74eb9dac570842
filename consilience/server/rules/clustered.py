"""One model per cluster of clients; the global model is their mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Checked, Count, OnlyWith
from consilience.core.tree import Tree, map_leaves
from consilience.server.averaging.combining.weighted_mean import weighted_mean
from consilience.server.geometry.geometry import measure
from consilience.server.rules.clusters import ClusterMetric, Groups, by_similarity, check_groups, in_order

NOWHERE = -1


@dataclass(frozen=True, kw_only=True)
class ClusteredAveraging(Checked):
    """Clients train their cluster's model, which becomes the plain mean of their replies (eq 5 of the SimProx paper).

    The first cohort with updates is clustered by them; later clients receive the global model once and join the cluster
    whose model is nearest to theirs. Alternatively, clients belong to the given `groups`. The global model is the plain
    mean of the cluster models (eq 6). A new client with a zero update has no cluster and does not count.
    """

    clusters: Annotated[Count, OnlyWith("groups", (None,))] = 2
    metric: ClusterMetric = "distance"
    groups: Groups | None = None
    needs_each_reply = True  # each cluster has a mean of its own

    def init(self, start: Tree, clients: int) -> Tree:
        """All clusters at the initial model, without members."""
        count = self.clusters if self.groups is None else len(self.groups)
        device = next(tree.leaves(start)).device
        cluster = torch.full((clients,), NOWHERE)
        if self.groups is not None:
            cluster = torch.from_numpy(check_groups(self.groups, clients, "ClusteredAveraging.groups"))
        trained = torch.zeros(count, dtype=torch.bool, device=device)
        models = tree.repeat(start, count)
        return {"model": start, "models": models, "trained": trained, "cluster": cluster.to(device)}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """Each client's cluster model; the global model for clients without a cluster."""
        mine = state["cluster"][torch.from_numpy(ids).to(state["cluster"].device)]
        own = tree.rows(state["models"], mine.clamp(min=0))
        shared = map_leaves(lambda leaf: leaf.expand(len(ids), *leaf.shape), state["model"])
        return Broadcast(shared={}, personal={"model": tree.where(mine >= 0, own, shared)})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The clusters' models after their members' replies, and the mean over the clusters that have trained."""
        cohort = in_order(cohort)
        ids = torch.from_numpy(cohort.ids).to(state["cluster"].device)
        mine = self._assigned(state, cohort, state["cluster"][ids])
        trained, models = state["trained"].clone(), state["models"]
        for number in mine[mine >= 0].unique().tolist():
            models = _with_mean(models, number, tree.rows(cohort.reply["model"], mine == number))
            trained[number] = True
        model = state["model"]
        if bool(trained.any()):
            model = _mean(tree.rows(models, trained))
        after = {"model": model, "models": models, "trained": trained, "cluster": state["cluster"].clone()}
        after["cluster"][ids] = mine
        return after, {"clusters": mine}

    def model(self, state: Tree) -> Tree:
        """The mean of the clusters' models."""
        return state["model"]

    def _assigned(self, state: Tree, cohort: Cohort, mine: Tensor) -> Tensor:
        """[m] clusters of the cohort, including new clients with a non-zero update."""
        params = cohort.reply["model"]["params"]
        moved = measure(params, state["model"]["params"]).movement > 0
        new = torch.nonzero((mine < 0) & moved.to(mine.device)).flatten()
        if not len(new):
            return mine
        if not bool(state["trained"].any()):
            keep = np.isin(np.arange(len(cohort)), new.cpu().numpy())
            found = by_similarity(cohort.only(keep), state["model"]["params"], self.clusters, self.metric)
            return mine.index_copy(0, new, torch.from_numpy(found).to(mine))
        homes = torch.nonzero(state["trained"]).flatten()
        both = tree.concatenate([tree.rows(params, new), tree.rows(state["models"]["params"], homes)])
        apart = measure(both, state["model"]["params"]).distance[: len(new), len(new) :]  # [new, trained clusters]
        return mine.index_copy(0, new, homes[apart.argmin(1).to(homes.device)])


def _with_mean(models: Tree, number: int, members: Tree) -> Tree:
    """Stacked models with one replaced by the mean of its members' replies."""
    mean = _mean(members)
    place = torch.tensor([number])
    return map_leaves(
        lambda stacked, one: stacked.index_copy(0, place.to(stacked.device), one.unsqueeze(0)), models, mean
    )


def _mean(stacked: Tree) -> Tree:
    count = len(next(tree.leaves(stacked)))
    weights = torch.full((count,), 1 / count, dtype=torch.float64, device=next(tree.leaves(stacked)).device)
    return map_leaves(lambda leaf: weighted_mean(leaf, weights), stacked)
