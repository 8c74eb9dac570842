"""Clients that also say how the model they were sent does on their rows, or how the one they trained does."""

from __future__ import annotations

from dataclasses import dataclass, field

from consilience.client.local_training import LocalTraining
from consilience.core.evaluate import LOOK, LossQuery
from consilience.core.plans import Batch, Work
from consilience.core.protocols import ClientRule
from consilience.core.task import Task
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class LossAtStart:
    """Training whose reply also holds `start_loss`: the received model's mean loss over the client's training rows."""

    training: ClientRule = field(default_factory=LocalTraining)

    @property
    def pre_training(self) -> ClientRule:
        """Before training: a pass over the rows with the received model."""
        return LossQuery()

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
        """The reply of training, and what the look found."""
        reply, kept = self.training.end(task, carry, message, memory)
        seen = message["seen"]
        return {**reply, "start_loss": seen["loss"] / seen["rows"].clamp(min=1)}, kept


@dataclass(frozen=True, kw_only=True)
class Score:
    """Federated evaluation that says the correct decisions and the rows alone: the loss in a reply is training's."""

    work: Work

    def init(self, start: Tree) -> Tree:
        """Nothing is remembered."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """As in a query for the loss."""
        return LossQuery(work=self.work).begin(task, message, memory)

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """As in a query for the loss."""
        return LossQuery(work=self.work).step(task, carry, batch, message, memory)

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """Two of the sums."""
        return {"correct": carry["correct"], "rows": carry["rows"]}, memory


@dataclass(frozen=True, kw_only=True)
class ScoreAtEnd:
    """Training, then a look at the client's training rows with the trained model: `correct` and `rows` in the reply."""

    training: ClientRule = field(default_factory=LocalTraining)

    @property
    def post_training(self) -> ClientRule:
        """After training: a pass over the rows with the trained model."""
        return Score(work=LOOK)

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
