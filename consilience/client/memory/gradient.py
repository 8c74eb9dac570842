"""FedDyn's memory of a client's gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from consilience.client.memory.memory import Done
from consilience.core.settings import Positive, check
from consilience.core.tree import Tree, map_leaves


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """g_k <- g_k - alpha (w_k - w): the gradient of the client's loss at w_k, if it solved its problem exactly."""

    alpha: Positive = 0.1

    def __post_init__(self) -> None:
        check(self)

    @property
    def name(self) -> str:
        """Its key in the client's memory."""
        return "gradient"

    def init(self, start: Tree) -> Tree:
        """Zero."""
        return map_leaves(torch.zeros_like, start["params"])

    def update(self, old: Tree, done: Done) -> tuple[Tree, Tree]:
        """By how far the client moved; nothing is added to the reply."""
        start = done.message["model"]["params"]
        return map_leaves(lambda g, w, x: g - self.alpha * (w - x), old, done.model["params"], start), {}
