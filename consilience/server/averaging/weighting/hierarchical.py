"""Two levels of plain means: over the clients of a cluster, then over the clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.settings import Checked, Count, OnlyWith
from consilience.core.tree import Tree
from consilience.server.rules.clusters import ClusterMetric, Groups, by_similarity, check_groups, in_order


@dataclass(frozen=True, kw_only=True)
class HierarchicalWeights(Checked):
    """1 / (M |C_k|) for a client of cluster C_k, M clusters: every cluster counts the same, whatever its size.

    The round's clients are clustered by their updates into at most `clusters`, or belong to the `groups` given (such as
    edge servers); groups without a reply do not count in M.
    """

    clusters: Annotated[Count, OnlyWith("groups", (None,))] = 2
    metric: Annotated[ClusterMetric, OnlyWith("groups", (None,))] = "distance"
    groups: Groups | None = None

    @property
    def needs_each_reply(self) -> bool:
        """Clusters need every model; known groups do not."""
        return self.groups is None

    def init(self, start: Tree, clients: int) -> Tree:
        """No state; groups are checked against the number of clients."""
        if self.groups is not None:
            check_groups(self.groups, clients, "HierarchicalWeights.groups")
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """Eqs (5) and (6) of the SimProx paper as weights."""
        labels = self._labels(cohort, model)
        found, sizes = np.unique(labels, return_counts=True)
        weights = 1 / (len(found) * sizes[np.searchsorted(found, labels)])
        return torch.from_numpy(weights).to(cohort.examples), state, {"clusters": torch.from_numpy(labels)}

    def _labels(self, cohort: Cohort, model: Tree) -> np.ndarray:
        if self.groups is not None:
            owner = {client: number for number, group in enumerate(self.groups) for client in group}
            return np.array([owner[client] for client in cohort.ids.tolist()])
        labels = by_similarity(in_order(cohort), model["params"], self.clusters, self.metric)
        return labels[np.argsort(np.argsort(cohort.ids))]
