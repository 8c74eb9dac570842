"""Label skew by Dirichlet draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from consilience.core.rng import host
from consilience.core.settings import Checked, Count, Invalid, Positive, Whole
from consilience.data.partition.apportion import deal, refuse_too_few, rows_by_class

TRIES = 1000  # draws before `min_size` is an error
PROBES = 20  # draws for each setting that the error might suggest


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Checked):
    """Each class is cut among the clients by its own draw p ~ Dir(alpha) (Hsu et al. 2019).

    Clients may stay empty. `balance` gives nothing more to clients that already hold the mean number of rows;
    `min_size` redraws until everyone holds at least that many.
    """

    clients: Count
    alpha: Positive
    balance: bool = False
    min_size: Whole = 0

    def split(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> list[np.ndarray]:
        """Row numbers per client."""
        _, rows = rows_by_class(labels, "dirichlet")
        totals = np.array([len(of_class) for of_class in rows])
        refuse_too_few("Dirichlet.min_size", self.min_size, self.clients, int(totals.sum()))
        best = 0
        for counts in self._draws(totals, host(seed, "dirichlet shares"), TRIES):
            smallest = int(counts.sum(0).min())
            if smallest >= self.min_size:
                return deal(rows, counts, host(seed, "dirichlet rows"))
            best = max(best, smallest)
        raise Invalid(
            f"Dirichlet.min_size = {self.min_size} was not reached in {TRIES} draws with "
            f"alpha = {self.alpha:g}, clients = {self.clients}: the best one leaves the smallest client "
            f"{best} rows. What works: min_size <= {best}{self._what_works(totals, seed)}"
        )

    def _draws(self, totals: np.ndarray, rng: np.random.Generator, tries: int) -> Iterator[np.ndarray]:
        """Rows of each class for each client, [classes, clients], draw after draw."""
        for _ in range(tries):
            weights = log_gamma(self.alpha, (len(totals), self.clients), rng)
            counts = np.empty(weights.shape, dtype=np.int64)
            held = np.zeros(self.clients, dtype=np.int64)
            for c, total in enumerate(totals):
                # While rows are left, some client holds less than the mean, so the mask is never empty.
                full = held * self.clients >= totals.sum() if self.balance else np.zeros(self.clients, dtype=bool)
                counts[c] = _cut(int(total), np.where(full, -np.inf, weights[c]))
                held += counts[c]
            yield counts

    def _what_works(self, totals: np.ndarray, seed: int) -> str:
        """Nearby settings, found by trial, that reach `min_size` in at least a tenth of their draws."""
        larger = (replace(self, alpha=self.alpha * 2.0**k) for k in range(1, 24))
        fewer = (replace(self, clients=self.clients >> k) for k in range(1, self.clients.bit_length()))
        alpha = next((p.alpha for p in larger if p._reaches(totals, seed)), None)
        clients = next((p.clients for p in fewer if p._reaches(totals, seed)), None)
        found = f", or alpha = {alpha:g}" if alpha is not None else ""
        return found + (f", or clients = {clients}" if clients is not None else "")

    def _reaches(self, totals: np.ndarray, seed: int) -> bool:
        draws = self._draws(totals, host(seed, "dirichlet probe"), PROBES)
        return sum(int(counts.sum(0).min()) >= self.min_size for counts in draws) * 10 >= PROBES


def log_gamma(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Logarithms of Gamma(alpha) draws, up to a constant per row; normalised along a row they are Dir(alpha).

    At small alpha every draw underflows to 0, and 0 / 0 is no share: so log G(a) = log G(a + 1) + log(U) / a.
    """
    if alpha >= 1:
        return np.log(rng.standard_gamma(alpha, shape))
    scaled = alpha * np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape)
    with np.errstate(over="ignore"):
        return np.maximum((scaled - scaled.max(axis=-1, keepdims=True)) / alpha, -1e300)


def _cut(total: int, log_weights: np.ndarray) -> np.ndarray:
    """`total` rows cut at the cumulative shares exp(log_weights) / sum."""
    running = np.cumsum(np.exp(log_weights - log_weights.max()))
    # Divided by its own last value, the running share is exactly 1 from the last client with a share onwards.
    edges = np.floor(running / running[-1] * total).astype(np.int64)
    return np.diff(edges, prepend=0)
