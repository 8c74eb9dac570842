"""Hierarchical federated learning: clients average at an edge server, edge servers periodically in the cloud."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.capabilities import Wraps
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Count, Invalid, Whole
from consilience.core.tree import Tree
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.combining.weighted_mean import weighted_mean
from consilience.server.rules.grouping import UNGROUPED, open_groups, update_groups


@dataclass(frozen=True, kw_only=True)
class EdgeCloud(Wraps):
    """Each round ends with an average at every edge; each `cloud_every`-th one with an average of the edges.

    Client k belongs to edge `edge_of[k]`, else to the k-th of equal blocks of clients. An edge counts in the cloud by
    the examples of its clients that have replied since the last cloud average; an edge without replies does not
    count.
    """

    averaging: Averaging = field(default_factory=Averaging)
    edges: Count = 2
    cloud_every: Count = 2
    edge_of: tuple[Whole, ...] | None = None
    holds = "averaging"
    refuses = UNGROUPED
    needs_each_reply = True  # each edge needs a sum of its own

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.edge_of is not None and max(self.edge_of, default=0) >= self.edges:
            raise Invalid(f"edge_of names edge {max(self.edge_of)}, but edges = {self.edges}: count from 0")

    def init(self, start: Tree, clients: int) -> Tree:
        """Every edge at the start model."""
        device = next(tree.leaves(start)).device
        return {
            "groups": open_groups(self.averaging, [start] * self.edges, clients),
            "edge": torch.from_numpy(self._edges(clients)).to(device),
            "rows": torch.zeros(
                clients, dtype=torch.float64, device=device
            ),  # of clients that replied since the last cloud mean
            "rounds": torch.zeros((), dtype=torch.int64, device=device),
        }

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """To each client its edge's model."""
        mine = state["edge"][torch.from_numpy(ids).to(state["edge"].device)]
        return Broadcast(shared={}, personal={"model": tree.rows(state["groups"]["model"], mine)})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """Average at the edges and, when it is time, in the cloud."""
        where = torch.from_numpy(cohort.ids).to(state["edge"].device)
        edge = state["edge"][where]
        groups, weights = update_groups(self.averaging, state["groups"], cohort, edge.cpu().numpy())
        after = {**state, "groups": groups, "rounds": state["rounds"] + 1}
        after["rows"] = state["rows"].index_copy(0, where, cohort.examples.to(state["rows"]))
        cloud = int(after["rounds"]) % self.cloud_every == 0
        if cloud:
            after["groups"] = {**groups, "model": tree.repeat(self.model(after), self.edges)}
            after["rows"] = torch.zeros_like(after["rows"])
        return after, {"weights": weights, "edge": edge, "cloud": torch.tensor(cloud)}

    def model(self, state: Tree) -> Tree:
        """The cloud average of the current edge models."""
        shares = self._shares(state)
        return tree.map_leaves(lambda leaf: weighted_mean(leaf, shares), state["groups"]["model"])

    def _shares(self, state: Tree) -> Tensor:
        """[E] weights of the edges; equal before the first reply."""
        rows = torch.zeros(self.edges, dtype=torch.float64, device=state["rows"].device)
        rows = rows.index_add(0, state["edge"], state["rows"])
        return torch.where(rows.sum() > 0, rows / rows.sum().clamp(min=1), 1 / self.edges)

    def _edges(self, clients: int) -> np.ndarray:
        if self.edge_of is None:
            return np.arange(clients, dtype=np.int64) * self.edges // max(clients, 1)
        if len(self.edge_of) != clients:
            raise Invalid(f"edge_of has {len(self.edge_of)} entries for {clients} clients: give one each")
        return np.array(self.edge_of, dtype=np.int64)
