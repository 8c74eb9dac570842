"""Selection by the observed availability and speed of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from consilience.core.exchange import Pool
from consilience.core.rng import host
from consilience.selection.uniform import Sample


@dataclass(frozen=True, kw_only=True)
class ByAvailability(Sample):
    """`count` clients, or max(1, floor(`fraction` x all clients)), of those available now.

    prefer: "rare" draws with probability proportional to 1 / (share of rounds so far in which a client was available),
    so that rarely available clients train as often as others; "common" proportional to that share; "fast" takes the
    clients whose last replies took the least simulated time, after those that have not replied yet, in random order.
    """

    prefer: Literal["rare", "common", "fast"] = "rare"

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """The clients with the smallest sort keys."""
        able = pool.candidates
        draws = host(seed, "by_availability", round).exponential(size=len(pool))[able]
        return np.sort(able[np.lexsort((draws, self._order(pool, draws)))[: self.wanted(pool)]])

    def _order(self, pool: Pool, draws: np.ndarray) -> np.ndarray:
        """[candidates] sort keys, smallest first."""
        able = pool.candidates
        if self.prefer == "fast":
            seconds = np.full(len(pool), np.nan) if pool.seconds is None else pool.seconds
            return np.nan_to_num(seconds[able], nan=-np.inf)
        presence = np.ones(len(pool)) if pool.presence is None else pool.presence
        # a race of exponential clocks with rates p_k is a sample by p_k without replacement
        return draws * presence[able] if self.prefer == "rare" else draws / presence[able]
