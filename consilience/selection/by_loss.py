"""Clients with a larger loss take part more often: drawn by their loss, or by power of choice (Cho et al. 2020)."""

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
    """`count` clients, or floor(`fraction` x all clients) but at least one, drawn without replacement by their loss.

    proportional_to: probabilities follow the "loss" F_k, the "softmax" exp(F_k / temperature), or the "total" N_k F_k.
    fresh_losses: ask every candidate for its loss at the current model (a pass over its rows, and the model sent);
    otherwise the loss it last reported counts, and a client that has reported none counts as the worst known.
    """

    proportional_to: Literal["loss", "softmax", "total"] = "loss"
    temperature: Annotated[Positive, OnlyWith("proportional_to", ("softmax",))] = 1.0
    fresh_losses: bool = True

    def queries(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """Everyone who could be chosen, unless old losses are used."""
        return pool.candidates if self.fresh_losses else pool.candidates[:0]

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """A fresh sample; a client's draw does not depend on the others."""
        candidates = pool.candidates
        draws = host(seed, "by_loss", round).exponential(size=len(pool))[candidates]
        # a race of exponential clocks with rates p_k: who is first, then first of the rest, ... is a sample by p_k
        # without replacement; in logarithms, so that no softmax overflows. Clients with p = 0 come last, at random.
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
        if (losses < 0).any():
            worst = candidates[losses.argmin()]
            raise Invalid(
                f"ByLoss.proportional_to = {self.proportional_to!r} needs losses >= 0, but that of client {worst} is "
                f"{losses.min():g}: use 'softmax'"
            )
        with np.errstate(divide="ignore"):
            return np.log(losses * pool.sizes[candidates]) if self.proportional_to == "total" else np.log(losses)


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
