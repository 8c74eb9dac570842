"""The client keeps the model it trained."""

from __future__ import annotations

from dataclasses import dataclass

from consilience.client.memory.memory import Done
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model at the end of the client's last round, as its personal model; the initial model before."""

    @property
    def name(self) -> str:
        """Its key in the client's memory."""
        return "trained_model"

    @property
    def is_own_model(self) -> bool:
        """The client uses this model."""
        return True

    def init(self, start: Tree) -> Tree:
        """The initial model."""
        return start

    def update(self, old: Tree, done: Done) -> tuple[Tree, Tree]:
        """What training ended with; nothing is added to the reply."""
        return done.model, {}
