"""Adaptive local optimisers and Lion; those of torch.optim are equal to it up to rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.settings import Checked, Decay, NonNegative, Positive
from consilience.core.tree import Tree, map_leaves


@dataclass(frozen=True, kw_only=True)
class RMSprop(Checked):
    """As torch.optim.RMSprop: w <- w - lr u, u = g / (sqrt(v) + eps), v <- alpha v + (1 - alpha) g^2."""

    lr: Positive = 0.01
    alpha: Decay = 0.99
    eps: Positive = 1e-8
    momentum: Decay = 0.0  # of u
    centred: bool = False  # v minus the square of the mean gradient
    weight_decay: NonNegative = 0.0

    def init(self, params: Tree) -> Tree:
        """Everything at zero."""
        kept = ["square", *(["mean"] if self.centred else []), *(["velocity"] if self.momentum else [])]
        return {name: _zeros(params) for name in kept}

    def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        """One step."""
        grads = _decayed(grads, params, self.weight_decay)
        square = _averaged_squares(state["square"], grads, self.alpha)
        after, spread = {"square": square}, square
        if self.centred:
            after["mean"] = _averaged(state["mean"], grads, self.alpha)
            spread = map_leaves(lambda v, m: v - m * m, square, after["mean"])
        moves = map_leaves(lambda g, v: g / (v.sqrt() + self.eps), grads, spread)
        if self.momentum:
            moves = map_leaves(lambda old, u: self.momentum * old + u, state["velocity"], moves)
            after["velocity"] = moves
        return map_leaves(lambda w, u: w - self.lr * u, params, moves), after


@dataclass(frozen=True, kw_only=True)
class Adagrad(Checked):
    """As torch.optim.Adagrad: v <- v + g^2, w <- w - lr g / (sqrt(v) + eps); v restarts in every round."""

    lr: Positive = 0.01
    eps: Positive = 1e-10
    initial: NonNegative = 0.0  # v before the first step
    weight_decay: NonNegative = 0.0

    def init(self, params: Tree) -> Tree:
        """v at its initial value."""
        return {"square": map_leaves(lambda w: torch.full_like(w, self.initial), params)}

    def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        """One step."""
        grads = _decayed(grads, params, self.weight_decay)
        square = map_leaves(lambda v, g: v + g * g, state["square"], grads)
        moved = map_leaves(lambda w, g, v: w - self.lr * g / (v.sqrt() + self.eps), params, grads, square)
        return moved, {"square": square}


@dataclass(frozen=True, kw_only=True)
class Adadelta(Checked):
    """As torch.optim.Adadelta: w <- w - lr u, u = g sqrt(d + eps) / sqrt(v + eps); v, d mean squares of g and u."""

    lr: Positive = 1.0
    rho: Decay = 0.9
    eps: Positive = 1e-6
    weight_decay: NonNegative = 0.0

    def init(self, params: Tree) -> Tree:
        """Both at zero."""
        return {"square": _zeros(params), "moved": _zeros(params)}

    def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        """One step."""
        grads = _decayed(grads, params, self.weight_decay)
        square = _averaged_squares(state["square"], grads, self.rho)

        def move(g: Tensor, v: Tensor, d: Tensor) -> Tensor:
            return g * (d + self.eps).sqrt() / (v + self.eps).sqrt()

        moves = map_leaves(move, grads, square, state["moved"])
        after = {"square": square, "moved": _averaged_squares(state["moved"], moves, self.rho)}
        return map_leaves(lambda w, u: w - self.lr * u, params, moves), after


@dataclass(frozen=True, kw_only=True)
class Adamax(Checked):
    """As torch.optim.Adamax: w <- w - lr m_hat / v, v <- max(beta2 v, |g| + eps)."""

    lr: Positive = 0.002
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0

    def init(self, params: Tree) -> Tree:
        """Everything at zero."""
        return {"mean": _zeros(params), "largest": _zeros(params), "count": _count(params)}

    def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        """One step."""
        grads = _decayed(grads, params, self.weight_decay)
        count = state["count"] + 1
        mean = _averaged(state["mean"], grads, self.beta1)
        largest = map_leaves(lambda v, g: torch.maximum(self.beta2 * v, g.abs() + self.eps), state["largest"], grads)
        rate = self.lr / (1 - torch.pow(self.beta1, count))
        moved = map_leaves(lambda w, m, v: w - rate.to(w.dtype) * m / v, params, mean, largest)
        return moved, {"mean": mean, "largest": largest, "count": count}


@dataclass(frozen=True, kw_only=True)
class NAdam(Checked):
    """As torch.optim.NAdam: Adam with Nesterov momentum."""

    lr: Positive = 0.002
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: Positive = 1e-8
    momentum_decay: NonNegative = 0.004
    weight_decay: NonNegative = 0.0
    decoupled: bool = False

    def init(self, params: Tree) -> Tree:
        """Both moments at zero, the product of momenta at one."""
        count = _count(params)
        return {"mean": _zeros(params), "square": _zeros(params), "count": count, "product": torch.ones_like(count)}

    def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        """One step."""
        if self.decoupled and self.weight_decay:
            params = map_leaves(lambda w: w * (1 - self.lr * self.weight_decay), params)
        else:
            grads = _decayed(grads, params, self.weight_decay)
        count = state["count"] + 1
        now, ahead = self._momentum(count), self._momentum(count + 1)
        product = state["product"] * now
        mean = _averaged(state["mean"], grads, self.beta1)
        square = _averaged_squares(state["square"], grads, self.beta2)
        of_gradient = self.lr * (1 - now) / (1 - product)
        of_mean = self.lr * ahead / (1 - product * ahead)
        correction = 1 - torch.pow(self.beta2, count)

        def move(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
            root = (v / correction.to(w.dtype)).sqrt() + self.eps
            return w - (of_gradient.to(w.dtype) * g + of_mean.to(w.dtype) * m) / root

        after = {"mean": mean, "square": square, "count": count, "product": product}
        return map_leaves(move, params, grads, mean, square), after

    def _momentum(self, count: Tensor) -> Tensor:
        return self.beta1 * (1 - 0.5 * torch.exp(count * (self.momentum_decay * math.log(0.96))))


@dataclass(frozen=True, kw_only=True)
class Lion(Checked):
    """Chen et al. 2023: w <- w - lr (sign(beta1 m + (1 - beta1) g) + weight_decay w), m <- beta2 m + (1 - beta2) g."""

    lr: Positive = 1e-4
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    weight_decay: NonNegative = 0.0

    def init(self, params: Tree) -> Tree:
        """The mean gradient at zero."""
        return {"mean": _zeros(params)}

    def step(self, params: Tree, grads: Tree, state: Tree, round: Tensor) -> tuple[Tree, Tree]:
        """One step of equal length in every coordinate."""
        towards = _averaged(state["mean"], grads, self.beta1)

        def move(w: Tensor, u: Tensor) -> Tensor:
            return w * (1 - self.lr * self.weight_decay) - self.lr * torch.sign(u)

        return map_leaves(move, params, towards), {"mean": _averaged(state["mean"], grads, self.beta2)}


def _zeros(params: Tree) -> Tree:
    return map_leaves(torch.zeros_like, params)


def _count(params: Tree) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)


def _decayed(grads: Tree, params: Tree, weight_decay: float) -> Tree:
    """g + weight_decay w."""
    return map_leaves(lambda g, w: torch.add(g, w, alpha=weight_decay), grads, params) if weight_decay else grads


def _averaged(old: Tree, new: Tree, keep: float) -> Tree:
    return map_leaves(lambda m, g: torch.lerp(m, g, 1 - keep), old, new)


def _averaged_squares(old: Tree, new: Tree, keep: float) -> Tree:
    return map_leaves(lambda v, g: keep * v + (1 - keep) * g * g, old, new)
