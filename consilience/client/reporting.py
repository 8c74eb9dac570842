"""Clients that also report how the received or the trained model performs on their rows."""

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
from consilience.core.evaluate import ONE_PASS, LossQuery
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
        """Evaluate the received model on the client's rows."""
        return LossQuery(rule=_with_own_layers(self.training))

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The reply of training, and the measured loss."""
        reply, kept = self.training.end(task, carry, message, memory)
        seen = message["seen"]
        return {**reply, "start_loss": seen["loss"] / seen["rows"].clamp(min=1)}, kept


@dataclass(frozen=True, kw_only=True)
class Score:
    """Evaluation that reports only correct decisions and rows, since the loss in a reply is the training loss."""

    work: Work
    rule: PersonalRule | None = None

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """As in a query for the loss."""
        return LossQuery(work=self.work, rule=self.rule).begin(task, message, memory)

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """As in a query for the loss."""
        return LossQuery(work=self.work, rule=self.rule).step(task, carry, batch, message, memory)

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The sums of correct decisions and rows."""
        return {"correct": carry["correct"], "rows": carry["rows"]}, memory


@dataclass(frozen=True, kw_only=True)
class ScoreAtEnd(Wrapped):
    """Training, then evaluation of the trained model on the client's training rows: adds `correct` and `rows`."""

    training: ClientRule = field(default_factory=LocalTraining)
    refuses: ClassVar[Reasons] = {
        PostTrainingPass: "has a pass after training, and so has ScoreAtEnd: there can be only one, leave one out",
    }

    @property
    def post_training(self) -> ClientRule:
        """Evaluate the trained model on the client's rows."""
        return Score(work=ONE_PASS, rule=_with_own_layers(self.training))


@dataclass(frozen=True, kw_only=True)
class _WithOwnLayers:
    """The model in the message (received or trained) with the client's personal layers filled in."""

    training: KeepsLayers
    is_personal = True  # every client has personal layers

    def personal(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """Shared leaves from the message, the client's own from its memory."""
        return self.training.completed(message["model"], memory)


def _with_own_layers(training: ClientRule) -> PersonalRule | None:
    """A rule that fills a client's personal layers into a model; None if clients keep none."""
    keeps = capability(training, KeepsLayers)
    return None if keeps is None or keeps.personal_layers is None else _WithOwnLayers(training=keeps)
