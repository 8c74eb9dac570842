"""Training of two models on every batch: the shared model and the client's personal model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from consilience.client.local_training import LocalTraining
from consilience.core.capabilities import (
    ChecksTask,
    KeepsLayers,
    PersonalRule,
    PostTrainingPass,
    PreTrainingPass,
    Reasons,
    Wraps,
    capability,
)
from consilience.core.plans import Batch, Work
from consilience.core.protocols import ClientRule
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class PersonalTraining(Wraps):
    """`shared` trains the received model and replies; `own` trains the client's personal model, which is never sent.

    The terms of `own` use the received model as their reference (Ditto's anchor).
    """

    shared: ClientRule = field(default_factory=LocalTraining)
    own: LocalTraining = field(default_factory=LocalTraining)
    holds = "shared"
    replaces: ClassVar[Reasons] = {PersonalRule: "the client uses its own model, not what it makes of the shared one"}
    refuses: ClassVar[Reasons] = {
        PreTrainingPass: "has a pass before training, which would not find its memory beside the client's own model",
        PostTrainingPass: "has a pass after training, which would not find its memory beside the client's own model",
    }
    is_personal = True  # every client has a personal model

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.own.work != self.shared.work:
            raise Invalid(
                f"own.work = {self.own.work!r} must be shared.work = {self.shared.work!r}: both see each batch"
            )
        if self.own.memory or self.own.personal_layers is not None:
            raise Invalid("own has a memory or personal layers, but its whole model is remembered: leave them out")

    @property
    def work(self) -> Work:
        """Epochs and batch size."""
        return self.shared.work

    def init(self, start: Tree) -> Tree:
        """The personal model starts as the initial model."""
        return {"own": start, "shared": self.shared.init(start)}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """Both models before training, each with a new solver state."""
        mine = self.own.begin(task, {**message, "model": memory["own"]}, {})
        return {"shared": self.shared.begin(task, message, memory["shared"]), "own": mine}

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """One step of each on the same batch."""
        return {
            "shared": self.shared.step(task, carry["shared"], batch, message, memory["shared"]),
            "own": self.own.step(task, carry["own"], batch, message, {}),
        }

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The shared model's reply; both memories."""
        reply, kept = self.shared.end(task, carry["shared"], message, memory["shared"])
        mine, _ = self.own.end(task, carry["own"], message, {})
        return reply, {"own": mine["model"], "shared": kept}

    def check_against(self, task: Task) -> None:
        """Refuse what either rule does not support."""
        self.own.check_against(task)
        shared = capability(self.shared, ChecksTask)
        if shared is not None:
            shared.check_against(task)

    @property
    def personal_layers(self) -> object | None:
        """Those of the rule `shared`."""
        keeps = capability(self.shared, KeepsLayers)
        return None if keeps is None else keeps.personal_layers

    def kept_leaves(self, model: Tree) -> frozenset[str]:
        """Those of the rule `shared`."""
        keeps = capability(self.shared, KeepsLayers)
        return frozenset() if keeps is None else keeps.kept_leaves(model)

    def completed(self, model: Tree, memory: Tree) -> Tree:
        """The shared model with the leaves that `shared` keeps."""
        keeps = capability(self.shared, KeepsLayers)
        return model if keeps is None else keeps.completed(model, memory.get("shared", {}))

    def personal(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """The personal model; the received one before the first round."""
        return memory["own"] if "own" in memory else message["model"]
