"""IFCA's server: k models; each client reports which one it trained."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from consilience.core import rng, tree
from consilience.core.capabilities import Wraps
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Count, Whole
from consilience.core.tree import Tree
from consilience.server.averaging.averaging import Averaging
from consilience.server.rules.grouping import UNGROUPED, largest, open_groups, update_groups

UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class ChosenClusters(Wraps):
    """All `clusters` models go to every client; each model becomes the average of the clients that chose it.

    The first model starts from the initial values, the others from the same values shuffled within each tensor: random
    weights keep their scale, and constants stay the same. The deployed model is the one that most clients chose last.
    """

    averaging: Averaging = field(default_factory=Averaging)
    clusters: Count = 2
    seed: Whole = 0
    holds = "averaging"
    refuses = UNGROUPED
    needs_each_reply = True  # it needs each client's choice

    def init(self, start: Tree, clients: int) -> Tree:
        """The models, with no choices yet."""
        starts = [start, *(_shuffled(start, self.seed, place) for place in range(1, self.clusters))]
        device = next(tree.leaves(start)).device
        chosen = torch.full((clients,), UNKNOWN, device=device)
        return {"groups": open_groups(self.averaging, starts, clients), "cluster": chosen}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """All models to all clients."""
        return Broadcast(shared={"models": state["groups"]["model"]})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """Each model averages over the clients that chose it; a model without clients is unchanged."""
        # a number that is none of the models counts as the nearest: its client could have chosen that one
        said = cohort.reply["cluster"].clamp(0, self.clusters - 1)
        groups, weights = update_groups(self.averaging, state["groups"], cohort, said.cpu().numpy())
        where = torch.from_numpy(cohort.ids).to(said.device)
        chosen = state["cluster"].index_copy(0, where, said)
        return {"groups": groups, "cluster": chosen}, {"weights": weights, "cluster": said}

    def model(self, state: Tree) -> Tree:
        """The model of most clients."""
        return tree.rows(state["groups"]["model"], largest(state["cluster"], self.clusters))


def _shuffled(start: Tree, seed: int, place: int) -> Tree:
    """A model with the values of every parameter shuffled."""

    def shuffle(name: str, value: torch.Tensor) -> torch.Tensor:
        order = rng.host(seed, "clusters", place, name).permutation(value.numel())
        return value.reshape(-1)[torch.from_numpy(order).to(value.device)].reshape(value.shape)

    return {**start, "params": {name: shuffle(name, value) for name, value in start["params"].items()}}
