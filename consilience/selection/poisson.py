"""Every client by its own coin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.exchange import Pool
from consilience.core.rng import host
from consilience.core.round_keys import uniforms
from consilience.core.settings import Fraction, check


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Each client with probability `rate`, whatever the others do; so a round may have none.

    The sampling that privacy accounting counts on: whether a client takes part says nothing about another. Where the
    round has a secret key, the coins are drawn from that instead of the run's seed: who took part must not be known.
    """

    rate: Fraction = 0.1

    def __post_init__(self) -> None:
        check(self)

    @property
    def sampling_rate(self) -> float:
        """The probability with which any client takes part, whatever the others have or do."""
        return self.rate

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """Those of the candidates whose coin fell their way."""
        # by place: a client's coin is the same whether or not others are there, or have rows
        if pool.secret is None:
            coins = host(seed, "poisson", round).random(len(pool))
        else:
            coins = uniforms(pool.secret, "poisson", len(pool))
        return pool.candidates[coins[pool.candidates] < self.rate]
