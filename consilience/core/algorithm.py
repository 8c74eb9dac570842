"""An algorithm is four parts and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass

from torch import Tensor

from consilience.core.exchange import Broadcast, Cohort
from consilience.core.protocols import Channel, ClientRule, Selection, ServerRule
from consilience.core.settings import Invalid
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

    def __post_init__(self) -> None:
        """Refuse a channel that delivers only a sum with a server that looks at single replies."""
        if getattr(self.channel, "sums_only", False) and self.server.needs_each_reply:
            names: list[str] = [f.name for f in fields(self.server)] if is_dataclass(self.server) else []
            inside = [getattr(self.server, name) for name in names]
            reading = [part for part in inside if getattr(part, "needs_each_reply", False)] or [self.server]
            raise Invalid(
                f"channel {type(self.channel).__name__} lets the server see only the sum of the replies, but "
                f"{' and '.join(type(part).__name__ for part in reading)} looks at each of them: change one of the two"
            )
