"""Paired tests of a method against the baseline: for each seed both had the same partition, initial model and trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from consilience.core.rng import host

EXACT = 16  # pairs: up to this many all 2^n sign patterns are tried, beyond it DRAWS random ones
DRAWS = 1 << EXACT
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Differences method - baseline over the seeds that both have; None if n is too small for a value."""

    n: int
    mean: float | None = None
    deviation: float | None = None
    low: float | None = None  # 95 % interval of the mean difference, by Student's t
    high: float | None = None
    p_t: float | None = None  # paired t test, two-sided
    p_permutation: float | None = None  # sign flips of the differences, two-sided
    p_sign: float | None = None  # binomial test of how many are positive, ties left out
    least_p: float | None = None  # the smallest p that the permutation test can give with this n

    @property
    def verdict(self) -> str:
        """Whether the difference is shown to be larger or smaller than 0, at p < 0.05, and by which tests."""
        if self.n < 2 or self.mean is None:
            return "n too small"
        if self.mean == 0 and self.deviation == 0:
            return "equal"
        if self.p_t is None or self.p_t >= LEVEL:
            return "not shown"
        word = "larger" if self.mean > 0 else "smaller"
        exact = self.p_permutation is not None and self.p_permutation < LEVEL
        return word if exact else f"{word} (t only)"


def paired(method: Sequence[float], baseline: Sequence[float]) -> Paired:
    """Two equally long lists, one value per seed."""
    differences = np.asarray(method, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    n = len(differences)
    if n == 0:
        return Paired(n=0)
    if n == 1:
        return Paired(n=1, mean=float(differences[0]))
    mean, deviation = float(differences.mean()), float(differences.std(ddof=1))
    error = deviation / math.sqrt(n)
    half, p_t = _student(mean, error, n - 1)
    return Paired(
        n=n,
        mean=mean,
        deviation=deviation,
        low=mean - half,
        high=mean + half,
        p_t=p_t,
        p_permutation=permutation_p(differences),
        p_sign=sign_p(differences),
        least_p=2.0 ** (1 - n),
    )


def permutation_p(differences: np.ndarray) -> float:
    """The share of all sign patterns whose mean is at least as far from 0: exact up to 16 pairs, sampled beyond.

    Not `scipy.stats.permutation_test`: it compares sums without a tolerance for rounding, so equal patterns can differ.
    """
    n, found = len(differences), abs(differences.sum())
    if n <= EXACT:
        signs = np.array(list(product((1.0, -1.0), repeat=n)))  # [2^n, n]
        extra = 0
    else:
        signs = host(0, "sign flips", n).choice([1.0, -1.0], size=(DRAWS, n))
        extra = 1  # the pattern that was observed
    rounding = 1e-12 * np.abs(differences).sum()
    as_far = np.abs(signs @ differences) >= found - rounding
    return float((as_far.sum() + extra) / (len(signs) + extra))


def sign_p(differences: np.ndarray) -> float:
    """Two-sided binomial test that as many differences are positive as negative; zeros are left out."""
    from scipy import stats  # comes with scikit-learn; a second to import

    positive, negative = int((differences > 0).sum()), int((differences < 0).sum())
    return float(stats.binomtest(positive, positive + negative).pvalue) if positive + negative else 1.0


def _student(mean: float, error: float, freedom: int) -> tuple[float, float | None]:
    """(half width of the 95 % interval, two-sided p); with no spread, t is undefined unless the mean is 0 too."""
    if error == 0:
        return 0.0, 1.0 if mean == 0 else None
    from scipy import stats  # comes with scikit-learn; a second to import

    return float(error * stats.t.ppf(1 - LEVEL / 2, freedom)), float(2 * stats.t.sf(abs(mean) / error, freedom))
