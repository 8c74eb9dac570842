"""Local optimisers as pure functions: SGD equals PyTorch's bit for bit, Adam and AdamW up to rounding.

Others are in `adaptive_solvers`; schedules, clipping and accumulation are in `solver_wrappers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from consilience.core.settings import Checked, Decay, Fraction, Invalid, NonNegative, Positive, check
from consilience.core.tree import Tree, map_leaves


@runtime_checkable
class Solver(Protocol):
    """Computes the next parameters from gradients; its state is reset every round.

    Pure functions for one client: the engine batches them with vmap, so Python control flow must not depend on tensor
    values. For schedules to be exact, the step must be proportional to `lr` and the state independent of it.
    """

    @property
    def lr(self) -> float:
        """The learning rate."""
        ...

    def init(self, params: Tree) -> Tree:
        """The state before the first step."""
        ...

    def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        """(parameters, state) after one step."""
        ...


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent, as torch.optim.SGD; the rate is lr x decay^round."""

    lr: Positive = 0.01
    momentum: Decay = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: bool = False
    decay: Fraction = 1.0

    def __post_init__(self) -> None:
        check(self)
        if self.nesterov and not self.momentum:
            raise Invalid("SGD.nesterov = True needs SGD.momentum > 0")

    def init(self, params: Tree) -> Tree:
        """Zero velocities, if there is momentum."""
        return {"velocity": map_leaves(torch.zeros_like, params)} if self.momentum else {}

    def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        """w <- w - lr v, v <- momentum v + g + weight_decay w."""
        if self.weight_decay:
            grads = map_leaves(lambda g, w: torch.add(g, w, alpha=self.weight_decay), grads, params)
        if self.momentum:
            velocity = map_leaves(lambda v, g: torch.mul(v, self.momentum).add(g), state["velocity"], grads)
            state = {"velocity": velocity}
            if self.nesterov:
                grads = map_leaves(lambda g, v: torch.add(g, v, alpha=self.momentum), grads, velocity)
            else:
                grads = velocity
        if self.decay == 1:
            return map_leaves(lambda w, g: torch.add(w, g, alpha=-self.lr), params, grads), state
        rate = self.lr * torch.pow(torch.as_tensor(self.decay, dtype=torch.float64, device=round.device), round)
        return map_leaves(lambda w, g: w - rate.to(w.dtype) * g, params, grads), state


@dataclass(frozen=True, kw_only=True)
class Adam(Checked):
    """Adam as torch.optim.Adam, or AdamW with `decoupled=True`."""

    lr: Positive = 0.001
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    decoupled: bool = False

    def init(self, params: Tree) -> Tree:
        """Both moments at zero, and the step count."""
        zeros = map_leaves(torch.zeros_like, params)
        count = torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
        return {"mean": zeros, "square": map_leaves(torch.clone, zeros), "count": count}

    def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        """w <- w - lr m_hat / (sqrt(v_hat) + eps)."""
        if self.weight_decay and not self.decoupled:
            grads = map_leaves(lambda g, w: torch.add(g, w, alpha=self.weight_decay), grads, params)
        if self.weight_decay and self.decoupled:
            params = map_leaves(lambda w: w * (1 - self.lr * self.weight_decay), params)
        count = state["count"] + 1
        mean = map_leaves(lambda m, g: torch.lerp(m, g, 1 - self.beta1), state["mean"], grads)
        square = map_leaves(lambda s, g: s * self.beta2 + (1 - self.beta2) * g * g, state["square"], grads)
        mean_scale = self.lr / (1 - torch.pow(self.beta1, count))
        square_scale = (1 - torch.pow(self.beta2, count)).sqrt()

        def move(w: Tensor, m: Tensor, s: Tensor) -> Tensor:
            return w - mean_scale.to(w.dtype) * m / (s.sqrt() / square_scale.to(w.dtype) + self.eps)

        return map_leaves(move, params, mean, square), {"mean": mean, "square": square, "count": count}
