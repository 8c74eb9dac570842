"""Poisson sampling: each client is selected independently."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.exchange import Pool
from consilience.core.rng import host
from consilience.core.settings import Checked, Fraction
from consilience.privacy.round_keys import uniforms


@dataclass(frozen=True, kw_only=True)
class Poisson(Checked):
    """Each client with probability `rate`, independently of the others; a round may have none.

    This is the sampling that privacy accounting assumes. If the round has a secret key, it replaces the run's seed,
    because the selected clients must stay secret.
    """

    rate: Fraction = 0.1

    @property
    def sampling_rate(self) -> float:
        """The probability that a client is selected, independent of all others."""
        return self.rate

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """The drawn candidates."""
        # indexed by client: a draw does not depend on which other clients are available or have rows
        if pool.secret is None:
            coins = host(seed, "poisson", round).random(len(pool))
        else:
            coins = uniforms(pool.secret, "poisson", len(pool))
        return pool.candidates[coins[pool.candidates] < self.rate]
