"""An algorithm is four parts and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from consilience.core.exchange import Broadcast, Cohort
from consilience.core.protocols import Channel, ClientRule, Selection, ServerRule
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The channel in which nothing happens to a reply."""

    def init(self, start: Tree) -> Tree:
        """Nothing is remembered."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The reply itself."""
        return reply, memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """The cohort itself."""
        return cohort


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Who takes part, what a client does, what happens to its reply in transit, what the server does."""

    selection: Selection
    client: ClientRule
    server: ServerRule
    channel: Channel = field(default_factory=Plain)
