"""Attacks that forge replies; some know only their own update, others all honest updates of the round."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from consilience.channel.attacks.malicious import Attack, alike, forged, split, starts, with_model
from consilience.channel.attacks.search import Target, strongest
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.rng import host
from consilience.core.settings import Count, OnlyWith, Positive, Whole
from consilience.core.tree import Tree, flatten, map_leaves, unflatten


@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    """Malicious clients send their update times -`scale`."""

    scale: Positive = 1.0

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Reverse malicious updates."""
        places = split(cohort, self.clients, self.fraction)
        return forged(cohort, received, *places, lambda own, _: map_leaves(lambda u: -self.scale * u, own))


@dataclass(frozen=True, kw_only=True)
class Scaling(Attack):
    """Malicious clients send their update times `factor` (model replacement, when the factor is about n)."""

    factor: float = 10.0

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Scale malicious updates."""
        places = split(cohort, self.clients, self.fraction)
        return forged(cohort, received, *places, lambda own, _: map_leaves(lambda u: self.factor * u, own))


@dataclass(frozen=True, kw_only=True)
class GaussianUpdate(Attack):
    """Malicious clients send normal noise of standard deviation `sigma` per parameter in place of their update."""

    sigma: Positive = 1.0

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


@dataclass(frozen=True, kw_only=True)
class ALittleIsEnough(Attack):
    """Baruch et al. 2019: all send mean + `strength` x standard deviation of the honest updates, per coordinate.

    Without `strength`, it is the paper's z for this round's n and f (0 when they are so few that z < 0). With
    `against`, the server's combining rule, the most harmful of `tries` strengths is searched every round.
    """

    strength: Positive | None = 1.5
    against: Target | None = None
    tries: Annotated[Count, OnlyWith("against")] = 21

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Replace malicious updates."""
        malicious, honest = split(cohort, self.clients, self.fraction)

        def attack(strength: float) -> Cohort:
            def forge(own: Tree, seen: Tree) -> Tree:
                return alike(map_leaves(lambda u: _shifted(u, strength), seen), len(malicious))

            return forged(cohort, received, malicious, honest, forge)

        if not len(malicious) or not len(honest):
            return cohort
        if self.against is not None:
            return attack(strongest(attack, self.against, honest, received, self.tries))
        return attack(largest_z(len(honest), len(malicious)) if self.strength is None else self.strength)


def largest_z(honest: int, malicious: int) -> float:
    """The paper's z: the largest shift at which enough honest updates lie further from the mean to form a majority."""
    n = honest + malicious
    supporters = n // 2 + 1 - malicious
    share = (honest - supporters) / honest
    return max(0.0, NormalDist().inv_cdf(min(share, 1 - 1e-6))) if share > 0 else 0.0


def _shifted(updates: Tensor, strength: float) -> Tensor:
    """[h, ...] -> [...]; the deviation of a single honest update is 0."""
    mean = torch.mean(updates, 0)
    return mean + strength * updates.std(0) if len(updates) > 1 else mean


@dataclass(frozen=True, kw_only=True)
class InnerProduct(Attack):
    """Xie et al. 2020: malicious clients all send -`strength` times the mean honest update.

    With `against`, the server's combining rule, the most harmful of `tries` strengths is searched every round.
    """

    strength: Positive = 2.0
    against: Target | None = None
    tries: Annotated[Count, OnlyWith("against")] = 21

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Replace malicious updates."""
        malicious, honest = split(cohort, self.clients, self.fraction)

        def attack(strength: float) -> Cohort:
            def forge(own: Tree, seen: Tree) -> Tree:
                return alike(map_leaves(lambda u: -strength * torch.mean(u, 0), seen), len(malicious))

            return forged(cohort, received, malicious, honest, forge)

        if self.against is None or not len(malicious) or not len(honest):
            return attack(self.strength)
        return attack(strongest(attack, self.against, honest, received, self.tries))


@dataclass(frozen=True, kw_only=True)
class Mimic(Attack):
    """Karimireddy et al. 2022: all send a copy of one honest client's model, harmless only if clients are IID.

    `victim` is the honest client to copy, if it replied; otherwise the first honest one.
    """

    victim: Whole | None = None

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Replace malicious models, buffers included."""
        malicious, honest = split(cohort, self.clients, self.fraction)
        if not len(malicious) or not len(honest):
            return cohort
        starts(cohort, received)  # refuses replies without a model
        there = np.flatnonzero(cohort.ids[honest.cpu().numpy()] == (-1 if self.victim is None else self.victim))
        source = honest[int(there[0]) if len(there) else 0]

        def copy(stacked: Tensor) -> Tensor:
            return stacked.index_copy(0, malicious, torch.stack([stacked[source]] * len(malicious)))

        return with_model(cohort, map_leaves(copy, cohort.reply["model"]))
