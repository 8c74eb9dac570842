"""FedSplit's server: the model is the mean of all clients' z, including those not in the round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Fraction, Invalid, Positive, check
from consilience.core.tree import Tree
from consilience.server.averaging.combining.weighted_mean import WeightedMean, weighted_mean
from consilience.server.protocols import Weighting, read_by
from consilience.stores.block_storage import BlockStorage, table_of
from consilience.stores.client_rows import ClientRows


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """x = sum_j p_j z_j over all clients with data, p_j = 1/K, N_j/N or given; clients that are silent keep their z_j.

    A reply w_j moves z_j by 2 relaxation (w_j - x), so x moves by the sum of p_j times that over those that replied,
    and the z_j can live with the clients. With `keeps_z` the server keeps them and sends each client its own: then x is
    their mean even where replies are changed in transit. The p_j decide what is minimised, sum_j p_j F_j, and are fixed
    for that reason. A `weighting` of the replies, a_j, decides how far each z_j moves: relaxation a_j / max_i a_i
    instead of relaxation, which leaves every fixed point where it is.
    """

    weights: Literal["uniform", "examples"] | tuple[Positive, ...] = "uniform"
    keeps_z: bool = False
    relaxation: Fraction = 1.0  # 1: Peaceman and Rachford's splitting, as in FedSplit; 0.5: Douglas and Rachford's
    weighting: Weighting | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.weighting is not None and not self.keeps_z:
            raise Invalid(
                "a weighting needs keeps_z = True: clients that keep z themselves have moved it before the server "
                "knows the weights"
            )

    @property
    def needs_each_reply(self) -> bool:
        """A sum is enough, unless each z_j is kept here."""
        return self.keeps_z

    @property
    def reads(self) -> tuple[str, ...]:
        """What the weighting reads of the replies."""
        return read_by(self.weighting)

    def init(self, start: Tree, clients: int) -> Tree:
        """x = z_1 = ... = z_K."""
        device = next(tree.leaves(start)).device
        state: Tree = {"model": start, "share": self._given(clients).to(device)}
        if self.keeps_z:
            state["z"] = ClientRows(BlockStorage(start["params"], device, clients=clients), clients).tree()
        return state if self.weighting is None else {**state, "weighting": self.weighting.init(start, clients)}

    @property
    def needs_sizes(self) -> bool:
        """Without them every client has the same share."""
        return self.weights == "examples"

    def receive_sizes(self, state: Tree, sizes: np.ndarray) -> Tree:
        """With the clients' sizes known: those without data have no share, since their z could never move."""
        rows = torch.from_numpy(np.asarray(sizes, dtype=np.float64)).to(state["share"].device)
        if self.weights == "examples":
            counted = rows
        else:
            counted = (rows > 0).to(torch.float64)
            if self.weights != "uniform":
                counted = counted * self._given(len(rows)).to(rows.device)
        return {**state, "share": counted / counted.sum()}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """x to all, and to each client its z if the server keeps it."""
        personal = {"z": table_of(state["z"]).read(ids)} if self.keeps_z else {}
        return Broadcast(shared={"model": state["model"]}, personal=personal)

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """x + sum_j 2 relaxation p_j (w_j - x); buffers, which have no z, are averaged over those that replied."""
        places = self._places(state, cohort.ids)
        x, replies, share = state["model"]["params"], cohort.reply["model"], state["share"][places]
        weights, told = share / share.sum(), {}
        pace: float | Tensor = 2 * self.relaxation
        notes: Notes = {}
        if self.weighting is not None:
            weights, told["weighting"], notes = self.weighting.weigh(cohort, state["model"], state["weighting"])
            pace = pace * _relative(weights).to(share.device)
        params = tree.map_rows(_moved, replies["params"], x, given=(pace * share,))
        buffers = WeightedMean().merge(replies["buffers"], weights)
        after = {**state, **told, "model": {"params": params, "buffers": buffers}}
        if self.keeps_z:
            moves = tree.map_leaves(lambda w, x: _paced(pace, w - x), replies["params"], x)  # [m, ...] - [...]
            kept = table_of(state["z"])
            moved = tree.map_leaves(torch.add, kept.read(cohort.ids), moves)
            after["z"] = kept.write(cohort.ids, moved).tree()
        return after, {"weights": weights, **notes}

    def model(self, state: Tree) -> Tree:
        """x."""
        return state["model"]

    def _given(self, clients: int) -> Tensor:
        """[K] p as far as it is known without sizes."""
        if isinstance(self.weights, str):
            return torch.full((clients,), 1 / clients, dtype=torch.float64)
        if len(self.weights) != clients:
            raise Invalid(f"Splitting.weights has {len(self.weights)} numbers for {clients} clients: give one for each")
        given = torch.tensor(self.weights, dtype=torch.float64)
        return given / given.sum()

    @staticmethod
    def _places(state: Tree, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).to(state["share"].device)


def _moved(stacked: Tensor, x: Tensor, share: Tensor) -> Tensor:
    """[...] x + sum_j share_j (w_j - x)."""
    return x + weighted_mean(stacked - x, share)


def _relative(weights: Tensor) -> Tensor:
    """[m] in [0, 1], 1 for the client that weighs most: beyond 1 splitting need not converge."""
    if not bool((weights >= 0).all()) or not bool(weights.max() > 0):
        raise Invalid(
            f"a client's z cannot move against its own reply, but the weights are {weights.tolist()}: use a weighting "
            "without negative weights"
        )
    return weights / weights.max()


def _paced(pace: float | Tensor, moves: Tensor) -> Tensor:
    """[m, ...] each move as far as its client's pace says."""
    if isinstance(pace, float):
        return pace * moves
    return pace.to(moves.dtype).reshape(-1, *(1,) * (moves.dim() - 1)) * moves
