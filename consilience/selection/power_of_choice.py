"""Power-of-choice selection: of a few random candidates, those with the largest losses (Cho et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.exchange import Pool
from consilience.core.rng import host
from consilience.core.settings import Count, Invalid
from consilience.selection.uniform import Sample


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(Sample):
    """`candidates` clients are drawn by their share of the rows; of these the `count` (or floor(`fraction` x all
    clients), at least one) with the largest losses at the current model take part.

    candidates: the paper's d, by default twice as many as take part. fresh_losses: ask the candidates for theirs (a
    pass over their rows, and the model sent); otherwise the losses they last reported count (the paper's rpow-d), and
    a client that has reported none counts as the worst.
    """

    candidates: Count | None = None
    fresh_losses: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates is not None and self.count is not None and self.candidates < self.count:
            raise Invalid(f"PowerOfChoice.candidates = {self.candidates} must be at least count = {self.count}")

    def queries(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """The candidates, unless old losses are used."""
        return self._drawn(round, pool, seed) if self.fresh_losses else pool.candidates[:0]

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """The candidates with the largest losses; of equal ones, those drawn first by number."""
        drawn = self._drawn(round, pool, seed)
        losses = np.nan_to_num(pool.losses[drawn], nan=np.inf)
        return np.sort(drawn[np.argsort(-losses, kind="stable")[: self.wanted(pool)]])

    def _drawn(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """Ascending ids, drawn without replacement with probability in proportion to their rows."""
        able = pool.candidates
        wanted = min(max(self.candidates or 2 * self.wanted(pool), self.wanted(pool)), len(able))
        if not wanted:
            return able
        shares = pool.sizes[able] / pool.sizes[able].sum()
        return np.sort(host(seed, "power_of_choice", round).choice(able, wanted, replace=False, p=shares))
