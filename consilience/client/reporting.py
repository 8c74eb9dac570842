"""Clients that also say how the model they were sent does on their rows, or how the one they trained does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from consilience.client.local_training import LocalTraining
from consilience.client.wrapped import Wrapped
from consilience.core.capabilities import (
    KeepsLayers,
    PersonalRule,
    PostTrainingPass,
    PreTrainingPass,
    Reasons,
    capability,
)
from consilience.core.evaluate import LOOK, LossQuery
from consilience.core.plans import Batch, Work
from consilience.core.protocols import ClientRule
from consilience.core.task import Task
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class LossAtStart(Wrapped):
    """Training whose reply also holds `start_loss`: the received model's mean loss over the client's training rows."""

    training: ClientRule = field(default_factory=LocalTraining)
    refuses: ClassVar[Reasons] = {
        PreTrainingPass: "has a pass before training, and so has LossAtStart: there can be only one, leave one out",
    }

    @property
    def pre_training(self) -> ClientRule:
        """Before training: a pass over the rows with the received model."""
        return LossQuery(rule=_with_own_layers(self.training))

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The reply of training, and what the look found."""
        reply, kept = self.training.end(task, carry, message, memory)
        seen = message["seen"]
        return {**reply, "start_loss": seen["loss"] / seen["rows"].clamp(min=1)}, kept


@dataclass(frozen=True, kw_only=True)
class Score:
    """Federated evaluation that says the correct decisions and the rows alone: the loss in a reply is training's."""

    work: Work
    rule: PersonalRule | None = None

    def init(self, start: Tree) -> Tree:
        """Nothing is remembered."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """As in a query for the loss."""
        return LossQuery(work=self.work, rule=self.rule).begin(task, message, memory)

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """As in a query for the loss."""
        return LossQuery(work=self.work, rule=self.rule).step(task, carry, batch, message, memory)

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """Two of the sums."""
        return {"correct": carry["correct"], "rows": carry["rows"]}, memory


@dataclass(frozen=True, kw_only=True)
class ScoreAtEnd(Wrapped):
    """Training, then a look at the client's training rows with the trained model: `correct` and `rows` in the reply."""

    training: ClientRule = field(default_factory=LocalTraining)
    refuses: ClassVar[Reasons] = {
        PostTrainingPass: "has a pass after training, and so has ScoreAtEnd: there can be only one, leave one out",
    }

    @property
    def post_training(self) -> ClientRule:
        """After training: a pass over the rows with the trained model."""
        return Score(work=LOOK, rule=_with_own_layers(self.training))


@dataclass(frozen=True, kw_only=True)
class _WithOwnLayers:
    """The model in the message, with the layers that the client keeps: where training begins, or what it ended with."""

    training: KeepsLayers
    is_personal = True  # every client has layers of its own

    def personal(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """Shared leaves from the message, the client's own from its memory."""
        return self.training.completed(message["model"], memory)


def _with_own_layers(training: ClientRule) -> PersonalRule | None:
    """What puts a client's own layers into a model; None where clients keep none."""
    keeps = capability(training, KeepsLayers)
    return None if keeps is None or keeps.personal_layers is None else _WithOwnLayers(training=keeps)
