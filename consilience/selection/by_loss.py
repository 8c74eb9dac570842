"""Selection that favours clients with a large loss: sampling by loss, or power of choice (Cho et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from consilience.core.exchange import Pool
from consilience.core.rng import host
from consilience.core.settings import Count, Invalid, OnlyWith, Positive
from consilience.selection.uniform import Sample


@dataclass(frozen=True, kw_only=True)
class ByLoss(Sample):
    """`count` clients, or max(1, floor(`fraction` x all clients)), drawn without replacement by their loss.

    proportional_to: probabilities follow the "loss" F_k, the "softmax" exp(F_k / temperature), or the "total" N_k F_k.
    fresh_losses: query every candidate's loss at the current model (costs a download of the model and a pass over its
    rows); otherwise use the last reported loss, and the largest known loss for a client that has reported none. A
    negative loss counts as 0 where most are not.
    """

    proportional_to: Literal["loss", "softmax", "total"] = "loss"
    temperature: Annotated[Positive, OnlyWith("proportional_to", ("softmax",))] = 1.0
    fresh_losses: bool = True

    def queries(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """All candidates, unless old losses are used."""
        return pool.candidates if self.fresh_losses else pool.candidates[:0]

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """A fresh sample; a client's draw does not depend on the others."""
        candidates = pool.candidates
        draws = host(seed, "by_loss", round).exponential(size=len(pool))[candidates]
        # exponential clocks with rates p_k: the order of their times is a sample by p_k without replacement; in
        # logarithms, so that no softmax overflows. Clients with p = 0 come last, at random.
        with np.errstate(divide="ignore"):
            arrival = np.log(draws) - self._log_rates(pool)
        return np.sort(candidates[np.lexsort((draws, arrival))[: self.wanted(pool)]])

    def probabilities(self, pool: Pool) -> np.ndarray:
        """[K] the probability of each client to be drawn first; 0 for those that cannot be chosen."""
        found = np.zeros(len(pool))
        rates = self._log_rates(pool)
        if len(rates):
            rates = np.exp(rates - rates.max()) if np.isfinite(rates.max()) else np.ones(len(rates))
            found[pool.candidates] = rates / rates.sum()
        return found

    def _log_rates(self, pool: Pool) -> np.ndarray:
        """[candidates] the logarithm of what the probability is proportional to."""
        candidates = pool.candidates
        losses = pool.losses[candidates].astype(np.float64)
        known = np.isfinite(losses)
        if not known.any():
            losses = np.ones(len(losses))
        losses = np.where(known, losses, losses[known].max(initial=-np.inf)) if known.any() else losses
        if self.proportional_to == "softmax":
            return losses / self.temperature
        negative = losses < 0
        if 2 * negative.sum() > len(losses):  # fewer may be clients that report what cannot be
            worst = candidates[losses.argmin()]
            raise Invalid(
                f"ByLoss.proportional_to = {self.proportional_to!r} needs losses >= 0, but those of {negative.sum()} "
                f"clients are not, that of client {worst} is {losses.min():g}: use 'softmax'"
            )
        losses = np.maximum(losses, 0.0)
        with np.errstate(divide="ignore"):
            return np.log(losses * pool.sizes[candidates]) if self.proportional_to == "total" else np.log(losses)


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(Sample):
    """Draws `candidates` clients by their share of the rows, then selects the `count` (or max(1, floor(`fraction` x all
    clients))) of these with the largest losses at the current model.

    candidates: the paper's d, by default twice the number selected. fresh_losses: query the candidates' losses (costs a
    download of the model and a pass over their rows); otherwise use the last reported losses (the paper's rpow-d), and
    the largest loss for a client that has reported none.
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
        """The candidates with the largest losses; ties go to the lower id."""
        drawn = self._drawn(round, pool, seed)
        losses = np.nan_to_num(pool.losses[drawn], nan=np.inf)
        return np.sort(drawn[np.argsort(-losses, kind="stable")[: self.wanted(pool)]])

    def _drawn(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """Ascending ids, drawn without replacement with probability proportional to their rows."""
        able = pool.candidates
        wanted = min(max(self.candidates or 2 * self.wanted(pool), self.wanted(pool)), len(able))
        if not wanted:
            return able
        shares = pool.sizes[able] / pool.sizes[able].sum()
        return np.sort(host(seed, "power_of_choice", round).choice(able, wanted, replace=False, p=shares))
