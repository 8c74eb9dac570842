"""Full participation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.exchange import Pool


@dataclass(frozen=True, kw_only=True)
class Everyone:
    """Every client that is available and has data."""

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """All candidates."""
        return pool.candidates
