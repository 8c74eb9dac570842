"""A little is enough (Baruch et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated

import torch
from torch import Tensor

from consilience.channel.attacks.malicious import alike, forged, require_some, split
from consilience.channel.attacks.search import Target, strongest
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.settings import Count, Fraction, OnlyWith, Positive, Whole, check
from consilience.core.tree import Tree, map_leaves


@dataclass(frozen=True, kw_only=True)
class ALittleIsEnough:
    """Malicious clients all send mean + `strength` x standard deviation of the honest updates, per coordinate.

    Without `strength`, it is the paper's z for this round's n and f (0 when they are so few that z < 0). With
    `against`, the server's combining rule, the most harmful of `tries` strengths is searched every round.
    """

    clients: tuple[Whole, ...] = ()
    fraction: Fraction | None = None
    strength: Positive | None = 1.5
    against: Target | None = None
    tries: Annotated[Count, OnlyWith("against")] = 21

    def __post_init__(self) -> None:
        check(self)
        require_some("ALittleIsEnough", self.clients, self.fraction)

    def init(self, start: Tree) -> Tree:
        """Nothing is remembered."""
        return {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The reply itself."""
        return reply, memory

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
    """The paper's z: so far from the mean that, of normal honest updates, enough for a majority are further away."""
    n = honest + malicious
    supporters = n // 2 + 1 - malicious
    share = (honest - supporters) / honest
    return max(0.0, NormalDist().inv_cdf(min(share, 1 - 1e-6))) if share > 0 else 0.0


def _shifted(updates: Tensor, strength: float) -> Tensor:
    """[h, ...] -> [...]; one honest update alone has no spread."""
    mean = torch.mean(updates, 0)
    return mean + strength * updates.std(0) if len(updates) > 1 else mean
