"""A uniform sample without replacement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.exchange import Pool
from consilience.core.rng import host
from consilience.core.settings import Count, Fraction, Invalid, check


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """`count` clients, or floor(`fraction` x all clients) but at least one, each equally likely."""

    fraction: Fraction | None = None
    count: Count | None = None

    def __post_init__(self) -> None:
        check(self)
        if (self.fraction is None) == (self.count is None):
            raise Invalid("Uniform takes either fraction or count: give exactly one of them")

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """A fresh sample of the available clients."""
        wanted = self.count or max(1, int(self.fraction * len(pool) + 1e-9))  # type: ignore[operator]
        candidates = pool.candidates
        chosen = host(seed, "uniform", round).choice(candidates, min(wanted, len(candidates)), replace=False)
        return np.sort(chosen)
