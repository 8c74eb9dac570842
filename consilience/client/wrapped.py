"""The delegating client rule: what a wrapper does not say is what the rule inside does."""

from __future__ import annotations

from consilience.core.capabilities import Wraps
from consilience.core.plans import Batch, Work
from consilience.core.protocols import ClientRule
from consilience.core.task import Task
from consilience.core.tree import Tree


class Wrapped(Wraps):
    """A client rule that does what `training` does; a wrapper inherits it and states what it adds."""

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
