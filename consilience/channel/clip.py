"""Clipping of each client's update to a maximum norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from consilience.channel.update import carrying, closed, each_floating, floating, norm, opened
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.settings import Checked, Positive
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Clip(Checked):
    """Clips each update to Euclidean norm `bound` over all parameters."""

    bound: Positive = 1.0
    form = "dense"  # the update keeps its shapes

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The update times min(1, bound / its norm)."""
        update = opened(reply, message, self)
        scale = (self.bound / norm(floating(update)).clamp(min=1e-300)).clamp(max=1)
        return carrying(reply, each_floating(lambda leaf, _: leaf * scale.to(leaf.dtype), update)), memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Models from updates."""
        return closed(cohort, received, cohort.reply["model"]["params"]) if len(cohort) else cohort
