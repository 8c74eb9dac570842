"""FedAMP's server: every client receives a personal mixture of the models most similar to its last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Checked, OnlyWith, Positive, Probability
from consilience.core.tree import Tree
from consilience.server.averaging.combining.weighted_mean import weighted_mean


@dataclass(frozen=True, kw_only=True)
class MessagePassing(Checked):
    """u_k = sum_j xi_kj w_j over the last models of all K clients, which the server keeps: K models in its state.

    "distance": xi_kj = alpha/sigma exp(-|w_k - w_j|^2 / sigma), the client's own model gets the rest (FedAMP).
    "cosine": the client's own model gets `own_share`, the rest is a softmax of sigma cos(w_k, w_j) (HeurFedAMP).
    """

    attention: Literal["distance", "cosine"] = "distance"
    alpha: Positive = 1.0
    sigma: Positive = 1.0
    own_share: Annotated[Probability, OnlyWith("attention", ("cosine",))] = 0.5
    needs_each_reply = True  # every model is compared with every other

    def init(self, start: Tree, clients: int) -> Tree:
        """Every client's last model is the initial one."""
        return {"models": tree.repeat(start, clients)}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """To each its own mixture."""
        where = torch.from_numpy(ids)
        shares = self.shares(state["models"]["params"])  # [K, K]

        def mix(stacked: Tensor) -> Tensor:
            if not stacked.is_floating_point():
                return stacked[where.to(stacked.device)]  # counters are the client's own
            wide = torch.promote_types(stacked.dtype, torch.float32)
            rows = shares[where.to(shares.device)].to(wide) @ stacked.to(wide).flatten(1)  # [m, K] @ [K, P]
            return rows.reshape(len(ids), *stacked.shape[1:]).to(stacked.dtype)

        return Broadcast(shared={}, personal={"model": tree.map_leaves(mix, state["models"])})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """Replace the models of those that replied."""
        where = torch.from_numpy(cohort.ids)
        models = tree.map_leaves(
            lambda old, new: old.index_copy(0, where.to(old.device), new), state["models"], cohort.reply["model"]
        )
        return {"models": models}, {"shares": self.shares(models["params"])}

    def model(self, state: Tree) -> Tree:
        """The mean of all clients' models, used in reports because there is no global model."""
        return tree.map_leaves(lambda leaf: weighted_mean(leaf, _even(leaf)), state["models"])

    def shares(self, params: Tree) -> Tensor:
        """[K, K] float64: row k says how much of each client's last model client k is sent; rows sum to one."""
        flat = torch.cat([leaf.flatten(1).to(torch.float64) for leaf in params.values()], 1)  # [K, P]
        others = 1 - torch.eye(len(flat), dtype=torch.float64, device=flat.device)
        if self.attention == "cosine":
            unit = flat / torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=1e-300)
            near = (self.sigma * (unit @ unit.T)).exp() * others  # cosines: no overflow unless sigma > 700
            share = (1 - self.own_share) * near / near.sum(1, keepdim=True).clamp(min=1e-300)
        else:
            share = self.alpha / self.sigma * torch.exp(-_squares(flat) / self.sigma) * others
            # Paper: alpha small enough for the client's own share to stay positive. Here: the others' shares are scaled
            # down to a sum of one where it would not, since |w_k - w_j| is not known when alpha is set.
            share = share / share.sum(1, keepdim=True).clamp(min=1)
        return share + torch.diag(1 - share.sum(1))


def _squares(flat: Tensor) -> Tensor:
    """[K, K] squared distances, from the mean, where they lose the fewest digits."""
    centred = flat - flat.mean(0)
    gram = centred @ centred.T
    squares = gram.diagonal()
    return (squares[:, None] + squares[None, :] - 2 * gram).clamp(min=0)


def _even(leaf: Tensor) -> Tensor:
    return torch.full((len(leaf),), 1 / len(leaf), dtype=torch.float64, device=leaf.device)
