"""The server step of FedAvgM."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from consilience.core.settings import Decay, Positive, check
from consilience.core.tree import Tree, map_leaves


@dataclass(frozen=True, kw_only=True)
class MomentumStep:
    """v <- beta v + d, w <- w + lr v, where d leads from the global model to the merged one."""

    lr: Positive = 1.0
    beta: Decay = 0.9

    def __post_init__(self) -> None:
        check(self)

    def init(self, params: Tree) -> Tree:
        """Standing still."""
        return {"velocity": map_leaves(torch.zeros_like, params)}

    def move(self, params: Tree, merged: Tree, state: Tree) -> tuple[Tree, Tree]:
        """One step of heavy-ball momentum, without damping."""
        velocity = map_leaves(lambda v, w, new: self.beta * v + (new - w), state["velocity"], params, merged)
        return map_leaves(lambda w, v: w + self.lr * v, params, velocity), {"velocity": velocity}
