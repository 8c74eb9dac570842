"""Gaussian noise on the new global parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from consilience.core.rng import host
from consilience.core.settings import NonNegative, Whole, check
from consilience.core.tree import Tree
from consilience.server.averaging.steps.replace import Replace
from consilience.server.protocols import Step


@dataclass(frozen=True, kw_only=True)
class Noisy:
    """Any step, then noise of this deviation on every parameter: a function of (seed, moves so far).

    It proves no privacy: nothing bounds how much one client can change the model.
    """

    deviation: NonNegative = 0.0
    seed: Whole = 0
    step: Step = field(default_factory=Replace)

    def __post_init__(self) -> None:
        check(self)

    def init(self, params: Tree) -> Tree:
        """The inner step's state, and how often it has moved."""
        return {"inner": self.step.init(params), "moves": torch.zeros((), dtype=torch.int64)}

    def move(self, params: Tree, merged: Tree, state: Tree) -> tuple[Tree, Tree]:
        """The inner step's parameters, disturbed."""
        moved, inner = self.step.move(params, merged, state["inner"])
        draw = host(self.seed, "noisy step", int(state["moves"]))
        noise = {name: draw.standard_normal(tuple(value.shape)) for name, value in moved.items()}
        moved = {name: value + torch.as_tensor(self.deviation * noise[name]).to(value) for name, value in moved.items()}
        return moved, {"inner": inner, "moves": state["moves"] + 1}
