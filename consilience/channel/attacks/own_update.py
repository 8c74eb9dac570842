"""Attacks of a client that knows only its own update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.channel.attacks.malicious import forged, require_some, split
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.rng import host
from consilience.core.settings import Fraction, Positive, Whole, check
from consilience.core.tree import Tree, flatten, map_leaves, unflatten


@dataclass(frozen=True, kw_only=True)
class SignFlip:
    """Malicious clients send their update times -`scale`."""

    clients: tuple[Whole, ...] = ()
    fraction: Fraction | None = None
    scale: Positive = 1.0

    def __post_init__(self) -> None:
        check(self)
        require_some("SignFlip", self.clients, self.fraction)

    def init(self, start: Tree) -> Tree:
        """Nothing is remembered."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The reply itself."""
        return reply, memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Reverse malicious updates."""
        places = split(cohort, self.clients, self.fraction)
        return forged(cohort, received, *places, lambda own, _: map_leaves(lambda u: -self.scale * u, own))


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Malicious clients send their update times `factor` (model replacement, when the factor is about n)."""

    clients: tuple[Whole, ...] = ()
    fraction: Fraction | None = None
    factor: float = 10.0

    def __post_init__(self) -> None:
        check(self)
        require_some("Scaling", self.clients, self.fraction)

    def init(self, start: Tree) -> Tree:
        """Nothing is remembered."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The reply itself."""
        return reply, memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Scale malicious updates."""
        places = split(cohort, self.clients, self.fraction)
        return forged(cohort, received, *places, lambda own, _: map_leaves(lambda u: self.factor * u, own))


@dataclass(frozen=True, kw_only=True)
class GaussianUpdate:
    """Malicious clients send normal noise of standard deviation `sigma` per parameter in place of their update."""

    clients: tuple[Whole, ...] = ()
    fraction: Fraction | None = None
    sigma: Positive = 1.0

    def __post_init__(self) -> None:
        check(self)
        require_some("GaussianUpdate", self.clients, self.fraction)

    def init(self, start: Tree) -> Tree:
        """Nothing is remembered."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The reply itself."""
        return reply, memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Draw malicious updates, each from the round's key and its own id."""
        malicious, honest = split(cohort, self.clients, self.fraction)
        ids = cohort.ids[malicious.cpu().numpy()].tolist()

        def noise(own: Tree, _: Tree) -> Tree:
            streams = [host(key % 2**64, "gaussian attack", client) for client in ids]
            drawn = {}
            for name, leaf in flatten(own).items():
                one = [torch.from_numpy(stream.standard_normal(tuple(leaf.shape[1:]))) for stream in streams]
                drawn[name] = (self.sigma * torch.stack(one)).to(leaf)
            return unflatten(drawn)

        return forged(cohort, received, malicious, honest, noise)
