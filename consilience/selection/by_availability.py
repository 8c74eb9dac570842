"""Selection by what the server has seen of its clients' reliability and speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from consilience.core.exchange import Pool
from consilience.core.rng import host
from consilience.selection.uniform import Sample


@dataclass(frozen=True, kw_only=True)
class ByAvailability(Sample):
    """`count` clients, or floor(`fraction` x all clients) but at least one, of those that are available now.

    prefer: "rare" draws with probability in proportion to 1 / (share of the rounds so far in which a client was
    available), so that rarely available clients take part as often as others; "common" in proportion to that share;
    "fast" takes those whose last replies took the least simulated time, and first of all, at random, those that have
    not replied yet.
    """

    prefer: Literal["rare", "common", "fast"] = "rare"

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """The clients that come first in the order of preference."""
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
