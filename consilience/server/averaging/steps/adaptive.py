"""The adaptive server steps of Reddi et al. 2021: FedAdagrad, FedAdam, FedYogi.

With d leading from the global model to the merged one, all three do m <- beta1 m + (1 - beta1) d and then
w <- w + lr m / (sqrt(v) + tau); they differ in v. There is no bias correction, and v starts at zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.settings import Checked, Decay, Positive
from consilience.core.tree import Tree, map_leaves


@dataclass(frozen=True, kw_only=True)
class AdagradStep(Checked):
    """v <- v + d^2."""

    lr: Positive = 0.01
    beta1: Decay = 0.0
    tau: Positive = 1e-3

    def init(self, params: Tree) -> Tree:
        """Both moments at zero."""
        return _zeros(params)

    def move(self, params: Tree, merged: Tree, state: Tree) -> tuple[Tree, Tree]:
        """A step scaled by the sum of all squares so far."""
        return _move(self, params, merged, state, lambda v, d: v + d * d)


@dataclass(frozen=True, kw_only=True)
class AdamStep(Checked):
    """v <- beta2 v + (1 - beta2) d^2."""

    lr: Positive = 0.01
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    tau: Positive = 1e-3

    def init(self, params: Tree) -> Tree:
        """Both moments at zero."""
        return _zeros(params)

    def move(self, params: Tree, merged: Tree, state: Tree) -> tuple[Tree, Tree]:
        """A step scaled by a decaying mean of squares."""
        return _move(self, params, merged, state, lambda v, d: self.beta2 * v + (1 - self.beta2) * d * d)


@dataclass(frozen=True, kw_only=True)
class YogiStep(Checked):
    """v <- v - (1 - beta2) d^2 sign(v - d^2)."""

    lr: Positive = 0.01
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    tau: Positive = 1e-3

    def init(self, params: Tree) -> Tree:
        """Both moments at zero."""
        return _zeros(params)

    def move(self, params: Tree, merged: Tree, state: Tree) -> tuple[Tree, Tree]:
        """A step scaled by v with additive changes, so that v cannot collapse in one round."""
        return _move(self, params, merged, state, self._square)

    def _square(self, v: Tensor, d: Tensor) -> Tensor:
        square = d * d
        return v - (1 - self.beta2) * square * torch.sign(v - square)


def _zeros(params: Tree) -> Tree:
    return {"mean": map_leaves(torch.zeros_like, params), "square": map_leaves(torch.zeros_like, params)}


def _move(
    step: AdagradStep | AdamStep | YogiStep,
    params: Tree,
    merged: Tree,
    state: Tree,
    square: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tree, Tree]:
    """The step shared by all three, which differ only in v."""
    delta = map_leaves(lambda new, w: new - w, merged, params)
    mean = map_leaves(lambda m, d: step.beta1 * m + (1 - step.beta1) * d, state["mean"], delta)
    squares = map_leaves(square, state["square"], delta)
    moved = map_leaves(lambda w, m, v: w + step.lr * m / (_root(v) + step.tau), params, mean, squares)
    return moved, {"mean": mean, "square": squares}


def _root(v: Tensor) -> Tensor:
    """sqrt(v) with derivative 0 at 0, where m is 0 too, so that m / (sqrt(v) + tau) has derivative 0."""
    zero = v == 0
    return torch.where(zero, v, torch.where(zero, 1.0, v).sqrt())  # the inner where avoids an infinite gradient
