"""A uniform sample without replacement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.exchange import Pool
from consilience.core.rng import host
from consilience.core.settings import Count, Fraction, Invalid, check


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Base class for selections of `count` clients, or max(1, floor(`fraction` x all clients))."""

    fraction: Fraction | None = None
    count: Count | None = None

    def __post_init__(self) -> None:
        check(self)
        if (self.fraction is None) == (self.count is None):
            raise Invalid(
                f"{type(self).__name__} takes either fraction or count: give exactly one of them, such as fraction=0.5"
            )

    def wanted(self, pool: Pool) -> int:
        """How many clients are to be chosen."""
        return self.count or max(1, int(self.fraction * len(pool) + 1e-9))  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class Uniform(Sample):
    """`count` clients, or max(1, floor(`fraction` x all clients)), each equally likely."""

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """A new sample of the available clients."""
        return np.sort(pool.draw(host(seed, "uniform", round), self.wanted(pool)))
