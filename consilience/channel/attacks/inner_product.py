"""Inner-product manipulation (Xie et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from consilience.channel.attacks.malicious import alike, forged, require_some, split
from consilience.channel.attacks.search import Target, strongest
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.settings import Count, Fraction, OnlyWith, Positive, Whole, check
from consilience.core.tree import Tree, map_leaves


@dataclass(frozen=True, kw_only=True)
class InnerProduct:
    """Malicious clients all send -`strength` times the mean honest update.

    With `against`, the server's combining rule, the most harmful of `tries` strengths is searched every round.
    """

    clients: tuple[Whole, ...] = ()
    fraction: Fraction | None = None
    strength: Positive = 2.0
    against: Target | None = None
    tries: Annotated[Count, OnlyWith("against")] = 21

    def __post_init__(self) -> None:
        check(self)
        require_some("InnerProduct", self.clients, self.fraction)

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
                return alike(map_leaves(lambda u: -strength * torch.mean(u, 0), seen), len(malicious))

            return forged(cohort, received, malicious, honest, forge)

        if self.against is None or not len(malicious) or not len(honest):
            return attack(self.strength)
        return attack(strongest(attack, self.against, honest, received, self.tries))
