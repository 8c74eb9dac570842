"""Gaussian noise that each client adds before it sends."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from consilience.channel.update import carrying, closed, each_floating, leaf_key, opened
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.rng import normals
from consilience.core.settings import Checked, NonNegative
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Noise(Checked):
    """Adds N(0, deviation^2) to every value of the update; after a `Clip`, this is the Gaussian mechanism."""

    deviation: NonNegative = 0.01
    form = "dense"  # the update keeps its shapes

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The update with noise."""

        def blur(leaf: Tensor, number: int) -> Tensor:
            noise = normals(leaf_key(key, number), leaf.numel()).reshape(leaf.shape)
            return leaf + (self.deviation * noise).to(leaf.dtype)

        return carrying(reply, each_floating(blur, opened(reply, message, self))), memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Models from updates."""
        return closed(cohort, received, cohort.reply["model"]["params"]) if len(cohort) else cohort
