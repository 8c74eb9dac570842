"""SimProx's and SimAgg's selection: a window slides over a shuffled list, so that every pass covers all clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.exchange import Pool
from consilience.core.rng import host
from consilience.core.settings import Checked, Fraction


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Checked):
    """Windows of floor(`fraction` x clients) over a random order; the last window of a pass wraps to its start."""

    fraction: Fraction = 0.3

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """The window of this round; clients in it that are not available skip the round."""
        clients = len(pool)
        window = max(1, int(self.fraction * clients + 1e-9))  # 0.3 * 20 must be 6, not 5.999
        pieces = -(-clients // window)
        order = host(seed, "sliding_window", round // pieces).permutation(clients)
        at = (round % pieces) * window + np.arange(window)
        chosen = np.sort(order[at % clients])
        return chosen[pool.able(chosen)]
