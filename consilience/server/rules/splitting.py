"""FedSplit's server: the model is the mean of every client's z, whether or not it takes part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Fraction, check
from consilience.core.tree import Tree
from consilience.server.averaging.combining.weighted_mean import WeightedMean, weighted_mean


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """x = sum_j p_j z_j over all clients with data, p_j = 1/K or N_j/N; clients that are silent keep their z_j.

    A reply w_j moves z_j by 2 relaxation (w_j - x), so x moves by the sum of p_j times that over those that replied,
    and the z_j can live with the clients. With `keeps_z` the server keeps them and sends each client its own: then x is
    their mean even where replies are changed in transit.
    """

    weights: Literal["uniform", "examples"] = "uniform"
    keeps_z: bool = False
    relaxation: Fraction = 1.0  # 1: Peaceman and Rachford's splitting, as in FedSplit; 0.5: Douglas and Rachford's

    def __post_init__(self) -> None:
        check(self)

    @property
    def needs_each_reply(self) -> bool:
        """A sum is enough, unless each z_j is kept here."""
        return self.keeps_z

    def init(self, start: Tree, clients: int) -> Tree:
        """x = z_1 = ... = z_K."""
        device = next(tree.leaves(start)).device
        state: Tree = {"model": start, "share": torch.full((clients,), 1 / clients, dtype=torch.float64, device=device)}
        return {**state, "z": tree.repeat(start["params"], clients)} if self.keeps_z else state

    @property
    def needs_sizes(self) -> bool:
        """Without them every client has the same share."""
        return self.weights == "examples"

    def receive_sizes(self, state: Tree, sizes: np.ndarray) -> Tree:
        """With the clients' sizes known: those without data have no share, since their z could never move."""
        rows = torch.from_numpy(np.asarray(sizes, dtype=np.float64)).to(state["share"].device)
        counted = rows if self.weights == "examples" else (rows > 0).to(torch.float64)
        return {**state, "share": counted / counted.sum()}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """x to all, and to each client its z if the server keeps it."""
        personal = {"z": tree.rows(state["z"], self._places(state, ids))} if self.keeps_z else {}
        return Broadcast(shared={"model": state["model"]}, personal=personal)

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """x + sum_j 2 relaxation p_j (w_j - x); buffers, which have no z, are averaged over those that replied."""
        places = self._places(state, cohort.ids)
        x, replies, share = state["model"]["params"], cohort.reply["model"], state["share"][places]
        weights, pace = share / share.sum(), 2 * self.relaxation
        params = tree.map_rows(_moved, replies["params"], x, given=(pace * share,))
        after = {**state, "model": {"params": params, "buffers": WeightedMean().merge(replies["buffers"], weights)}}
        if self.keeps_z:
            moves = tree.map_leaves(torch.sub, replies["params"], x)  # [m, ...] - [...]
            after["z"] = tree.map_leaves(lambda z, move: z.index_add(0, places, pace * move), state["z"], moves)
        return after, {"weights": weights}

    def model(self, state: Tree) -> Tree:
        """x."""
        return state["model"]

    @staticmethod
    def _places(state: Tree, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).to(state["share"].device)


def _moved(stacked: Tensor, x: Tensor, share: Tensor) -> Tensor:
    """[...] x + sum_j share_j (w_j - x)."""
    return x + weighted_mean(stacked - x, share)
