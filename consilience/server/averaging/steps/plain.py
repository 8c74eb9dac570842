"""Server steps without adaptive rates: take the merged model, momentum (Hsu et al. 2019), a schedule, added noise."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from consilience.core.rate_schedules import RateSchedule
from consilience.core.rng import host
from consilience.core.settings import Checked, Decay, Invalid, NonNegative, Positive, Whole, check
from consilience.core.tree import Tree, map_leaves
from consilience.server.protocols import MovesInRound, Step


@dataclass(frozen=True, kw_only=True)
class Replace:
    """The merged model becomes the global model."""

    def init(self, params: Tree) -> Tree:
        """No state."""
        return {}

    def move(self, params: Tree, merged: Tree, state: Tree) -> tuple[Tree, Tree]:
        """The merged parameters."""
        return merged, state


@dataclass(frozen=True, kw_only=True)
class MomentumStep(Checked):
    """v <- beta v + d, w <- w + lr v, where d leads from the global model to the merged one."""

    lr: Positive = 1.0
    beta: Decay = 0.9

    def init(self, params: Tree) -> Tree:
        """Zero velocity."""
        return {"velocity": map_leaves(torch.zeros_like, params)}

    def move(self, params: Tree, merged: Tree, state: Tree) -> tuple[Tree, Tree]:
        """One step of heavy-ball momentum, without damping."""
        velocity = map_leaves(lambda v, w, new: self.beta * v + (new - w), state["velocity"], params, merged)
        return map_leaves(lambda w, v: w + self.lr * v, params, velocity), {"velocity": velocity}


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """Any step, scaled by a factor that depends on the round: w <- w + factor (step(w) - w).

    This is a schedule of the step's learning rate, since a step is proportional to its rate (1 if it has none).
    """

    schedule: RateSchedule
    step: Step = field(default_factory=Replace)

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.step, MovesInRound):
            raise Invalid(f"ScheduledStep.step = {self.step!r} follows the round already: leave one schedule out")

    def init(self, params: Tree) -> Tree:
        """The inner step's state."""
        return self.step.init(params)

    def move(self, params: Tree, merged: Tree, state: Tree) -> tuple[Tree, Tree]:
        """As in the first round."""
        return self.move_in(params, merged, state, 0)

    def move_in(self, params: Tree, merged: Tree, state: Tree, round: int) -> tuple[Tree, Tree]:
        """The inner step, scaled by the schedule."""
        moved, state = self.step.move(params, merged, state)
        factor = float(self.schedule.factor_at(torch.tensor(round)))
        return map_leaves(lambda w, new: w + factor * (new - w), params, moved), state


@dataclass(frozen=True, kw_only=True)
class Noisy:
    """Any step, then noise of this deviation on every parameter, a function of (seed, number of steps so far).

    It gives no privacy guarantee: nothing bounds how much one client can change the model.
    """

    deviation: NonNegative = 0.0
    seed: Whole = 0
    step: Step = field(default_factory=Replace)

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.step, MovesInRound):
            raise Invalid(f"Noisy.step = {self.step!r}: put the schedule around the noisy step, not into it")

    def init(self, params: Tree) -> Tree:
        """The inner step's state and a step counter."""
        return {"inner": self.step.init(params), "moves": torch.zeros((), dtype=torch.int64)}

    def move(self, params: Tree, merged: Tree, state: Tree) -> tuple[Tree, Tree]:
        """The inner step's parameters plus noise."""
        moved, inner = self.step.move(params, merged, state["inner"])
        draw = host(self.seed, "noisy step", int(state["moves"]))
        noise = {name: draw.standard_normal(tuple(value.shape)) for name, value in moved.items()}
        moved = {name: value + torch.as_tensor(self.deviation * noise[name]).to(value) for name, value in moved.items()}
        return moved, {"inner": inner, "moves": state["moves"] + 1}
