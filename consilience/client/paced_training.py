"""Local training whose steps are scaled by the server (DUW-FedNova's client, Algorithm 5)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from consilience.client.local_training import LocalTraining
from consilience.client.solver_wrappers import plain_sgd
from consilience.client.wrapped import Wrapped
from consilience.core.plans import Batch
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree, map_leaves


@dataclass(frozen=True, kw_only=True)
class PacedTraining(Wrapped):
    """w <- w - pace lr g at every step, where each client receives its own `pace` with the model."""

    training: LocalTraining = field(default_factory=LocalTraining)

    def __post_init__(self) -> None:
        super().__post_init__()
        if plain_sgd(self.training.solver) is None:
            raise Invalid(
                f"PacedTraining scales the steps of plain SGD, not of {self.training.solver!r}: change the optimiser"
            )

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """One training step, scaled by `pace`."""
        after = self.training.step(task, carry, batch, message, memory)

        def further(old: Tensor, new: Tensor) -> Tensor:
            return old + message["pace"].to(old.dtype) * (new - old)

        params = map_leaves(further, carry["model"]["params"], after["model"]["params"])
        return {**after, "model": {**after["model"], "params": params}}
