"""Every client by its own coin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.exchange import Pool
from consilience.core.rng import host
from consilience.core.settings import Fraction, check


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Each client with probability `rate`, whatever the others do; so a round may have none.

    The sampling that privacy accounting counts on: whether a client takes part says nothing about another.
    """

    rate: Fraction = 0.1

    def __post_init__(self) -> None:
        check(self)

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """Those of the candidates whose coin fell their way."""
        coins = host(seed, "poisson", round).random(len(pool)) < self.rate
        return pool.candidates[coins[pool.candidates]]
