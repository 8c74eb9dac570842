"""Full participation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.exchange import Pool
from consilience.core.settings import Invalid


@dataclass(frozen=True, kw_only=True)
class Everyone:
    """Every client that is available and has data."""

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """All candidates."""
        return pool.candidates


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """The one client that holds all the data; runs and `train` pool a federation for it."""

    pools_data = True  # a federation is pooled for it

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """That client; a federation with several clients is refused."""
        if len(pool) > 1:
            raise Invalid(
                f"Pooled needs one client with all data, but there are {len(pool)} clients: give the engine "
                "federation.pooled(), or choose another selection"
            )
        return pool.candidates
