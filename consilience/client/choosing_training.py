"""IFCA's client: choose the model with the lowest loss on its own rows, and train it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from consilience.client.local_training import LocalTraining
from consilience.client.wrapped import Wrapped
from consilience.core.capabilities import PersonalRule, PostTrainingPass, PreTrainingPass, Reasons, capability
from consilience.core.plans import Batch, Work
from consilience.core.protocols import ClientRule
from consilience.core.task import Task
from consilience.core.tree import Tree, map_leaves, rows


@dataclass(frozen=True, kw_only=True)
class CompareModels:
    """One pass without training: the sum of the losses of each of `message["models"]`."""

    work: Work = field(default_factory=lambda: Work(epochs=1, batch_size=256, shuffle=False, trains=False))

    def init(self, start: Tree) -> Tree:
        """No memory."""
        return {}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """All sums at zero."""
        return {"losses": torch.zeros(_count(message), dtype=torch.float64, device=message["round"].device)}

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """Add one batch."""
        sums = []
        for place in range(_count(message)):
            output, _ = task.apply(rows(message["models"], place), batch.x, train=False)
            losses = task.row_losses(output, batch)
            sums.append((losses if batch.mask is None else losses * batch.mask).sum())
        return {"losses": carry["losses"] + torch.stack(sums)}

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The sums."""
        return carry, memory


@dataclass(frozen=True, kw_only=True)
class ChoosingTraining(Wrapped):
    """Trains the model with the lowest loss on all of the client's rows; stores and reports which one that was."""

    training: ClientRule = field(default_factory=LocalTraining)
    refuses: ClassVar[Reasons] = {
        PreTrainingPass: "has a pass before training, and so has ChoosingTraining: there can be only one, leave it out",
        PostTrainingPass: "has a pass after training, which would not find the model that was taken: leave it out",
    }
    is_personal = True  # clients use different models

    @property
    def pre_training(self) -> ClientRule:
        """Evaluate every model on the client's rows."""
        return CompareModels()

    def init(self, start: Tree) -> Tree:
        """Index of the first model, and training's memory."""
        device = next(iter(start["params"].values())).device
        return {**self.training.init(start), "cluster": torch.zeros((), dtype=torch.int64, device=device)}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """Start from the best model; from the last choice if no row was evaluated."""
        cluster = memory["cluster"]
        if "seen" in message:
            cluster = message["seen"]["losses"].argmin()
        return {"training": self.training.begin(task, _taken(message, cluster), memory), "cluster": cluster}

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """One step of training."""
        chosen = _taken(message, carry["cluster"])
        return {**carry, "training": self.training.step(task, carry["training"], batch, chosen, memory)}

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The trained model and its index."""
        cluster = carry["cluster"]
        reply, kept = self.training.end(task, carry["training"], _taken(message, cluster), memory)
        return {**reply, "cluster": cluster}, {**kept, "cluster": cluster}

    def personal(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """The model that the client chose last, as training personalises it."""
        chosen, own = _taken(message, memory["cluster"]), capability(self.training, PersonalRule)
        return chosen["model"] if own is None else own.personal(task, chosen, memory)


def _count(message: Tree) -> int:
    return len(next(iter(message["models"]["params"].values())))


def _taken(message: Tree, cluster: Tensor) -> Tree:
    """The message with only the chosen model."""
    model = map_leaves(lambda leaf: leaf.index_select(0, cluster.reshape(1)).squeeze(0), message["models"])
    return {**message, "model": model}
