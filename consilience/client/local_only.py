"""The local baseline: each client continues to train its own model and sends only its loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from consilience.client.local_training import LocalTraining
from consilience.client.wrapped import Wrapped
from consilience.core.capabilities import KeepsLayers, PersonalRule, PostTrainingPass, PreTrainingPass, Reasons
from consilience.core.plans import Batch
from consilience.core.protocols import ClientRule
from consilience.core.task import Task
from consilience.core.tree import Tree

OWN = "own_model"


@dataclass(frozen=True, kw_only=True)
class LocalOnly(Wrapped):
    """Training that starts from the client's own last model and ignores the server's."""

    training: ClientRule = field(default_factory=LocalTraining)
    replaces: ClassVar[Reasons] = {
        PersonalRule: "the client uses the model that it goes on training",
        KeepsLayers: "no layer is ever sent, so that none is kept apart from the others",
    }
    refuses: ClassVar[Reasons] = {
        PreTrainingPass: "has a pass before training, which would look with the server's model: there is none here",
        PostTrainingPass: "has a pass after training, for which the server would need the model: leave it out",
    }
    is_personal = True  # every client has only its own model

    def init(self, start: Tree) -> Tree:
        """The initial model, and training's memory."""
        return {**self.training.init(start), OWN: start}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """Start from its own model."""
        return self.training.begin(task, _with_own_model(message, memory), memory)

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """As in training."""
        return self.training.step(task, carry, batch, _with_own_model(message, memory), memory)

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The reply holds only the loss; the model is kept in memory."""
        reply, kept = self.training.end(task, carry, _with_own_model(message, memory), memory)
        return {"loss": reply["loss"]}, {**kept, OWN: reply["model"]}

    def personal(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """The client's own model."""
        return memory[OWN]


def _with_own_model(message: Tree, memory: Tree) -> Tree:
    return {**message, "model": memory[OWN]}
