"""The driver's record of a client rule and a channel, and their references for the workers."""

from __future__ import annotations

from typing import Any

from consilience.core import tree
from consilience.core.protocols import Channel, ClientRule
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.engines.placement import Placement
from consilience.engines.vectorised.program import Program, memories


class KnownRule:
    """A client rule and a channel: a program to predict replies, the initial memory, and where workers find them."""

    def __init__(self, program: Program, memory: Tree) -> None:
        self.program, self.memory = program, memory  # memory: [1, ...]
        self._stored: Any = None

    @property
    def stored(self) -> Any:
        """Reference to both in the object store."""
        if self._stored is None:
            import ray

            self._stored = ray.put((self.program.rule, self.program.channel))
        return self._stored


class KnownRules:
    """All rules that an engine has used."""

    def __init__(self, task: Task, placement: Placement) -> None:
        self._task, self._placement = task, placement
        self._known: dict[tuple[ClientRule, Channel], KnownRule] = {}

    def about(self, client: ClientRule, channel: Channel) -> KnownRule:
        """The record of these two."""
        known = self._known.get((client, channel))
        if known is None:
            start = self._placement.start(self._task)
            memory = tree.repeat(memories(client.init(start), channel.init(start)), 1)
            program = Program(client, channel, self._task, self._placement.dtype, self._placement.device, False)
            known = self._known[client, channel] = KnownRule(program, memory)
        return known
