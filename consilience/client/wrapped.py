"""Base class for client rules that wrap another: methods delegate to the wrapped rule unless overridden."""

from __future__ import annotations

from consilience.core.capabilities import Wraps
from consilience.core.plans import Batch, Work
from consilience.core.protocols import ClientRule
from consilience.core.task import Task
from consilience.core.tree import Tree


class Wrapped(Wraps):
    """A client rule that delegates to `training`; wrappers inherit it and override what they add."""

    holds = "training"
    training: ClientRule

    @property
    def work(self) -> Work:
        """As in training."""
        return self.training.work

    def init(self, start: Tree) -> Tree:
        """As in training."""
        return self.training.init(start)

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """As in training."""
        return self.training.begin(task, message, memory)

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """As in training."""
        return self.training.step(task, carry, batch, message, memory)

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """As in training."""
        return self.training.end(task, carry, message, memory)
