"""FedDC's drift variable."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from consilience.client.memory.memory import Done
from consilience.core.tree import Tree, map_leaves


@dataclass(frozen=True, kw_only=True)
class Drift:
    """h_i <- h_i + (w_i - w): all that the client ever moved away from the models it received."""

    @property
    def name(self) -> str:
        """Its key in the client's memory."""
        return "drift"

    def init(self, start: Tree) -> Tree:
        """Zero."""
        return map_leaves(torch.zeros_like, start["params"])

    def update(self, old: Tree, done: Done) -> tuple[Tree, Tree]:
        """Add this round's move; nothing is added to the reply."""
        start = done.message["model"]["params"]
        return map_leaves(lambda h, w, x: h + (w - x), old, done.model["params"], start), {}
