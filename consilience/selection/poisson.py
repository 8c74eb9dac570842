"""Poisson sampling: each client takes part independently."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.exchange import Pool
from consilience.core.rng import host
from consilience.core.settings import Fraction, check
from consilience.privacy.round_keys import uniforms


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Each client with probability `rate`, independently of the others; a round may have none.

    The sampling that privacy accounting assumes. Where the
    round has a secret key, the draws use that instead of the run's seed: who took part must stay secret.
    """

    rate: Fraction = 0.1

    def __post_init__(self) -> None:
        check(self)

    @property
    def sampling_rate(self) -> float:
        """The probability with which any client takes part, whatever the others have or do."""
        return self.rate

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """The candidates that were drawn."""
        # by place: a client's draw does not depend on which others are available or have rows
        if pool.secret is None:
            coins = host(seed, "poisson", round).random(len(pool))
        else:
            coins = uniforms(pool.secret, "poisson", len(pool))
        return pool.candidates[coins[pool.candidates] < self.rate]
