"""A clipping bound that tracks a quantile of the update norms by a noisy count.

Andrew et al. 2021, *Differentially private learning with adaptive clipping*: each client says whether its update is
within the bound, b_k = 1 or 0. The server adds noise of deviation s to sum_k (b_k - 1/2), and the bound becomes
C exp(-lr (b - quantile)) for the noisy share b. One client moves that sum by 1/2 and the sum of updates by C, so both
noises together are one Gaussian mechanism of noise z if z^-2 = z_updates^-2 + (2 s)^-2 (their theorem 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from consilience.core.settings import Checked, Fraction, Invalid, Positive

COUNT_SHARE = 0.05  # of the expected clients: the deviation that the paper proposes for the count
FARTHEST = 1.0  # largest distance of a noisy share from its quantile: the bound changes by at most e^lr per round


@dataclass(frozen=True, kw_only=True)
class AdaptiveBound(Checked):
    """C exp(-lr (b - quantile)): `quantile` of the updates are not clipped in the long run."""

    quantile: Fraction = 0.5
    lr: Positive = 0.2
    count_noise: Positive | None = None

    def deviation(self, expected: float) -> float:
        """The standard deviation of the noise on the count."""
        return COUNT_SHARE * expected if self.count_noise is None else self.count_noise

    def update_noise(self, noise: float, expected: float) -> float:
        """The noise on updates, in units of the bound, so that updates and count cost as much as `noise`."""
        left = noise**-2 - (2 * self.deviation(expected)) ** -2
        if left <= 0:
            raise Invalid(
                f"algorithm.noise = {noise:g} is more than the count of {expected:g} expected clients leaves room for: "
                f"its own noise of {self.deviation(expected):g} counts as {2 * self.deviation(expected):g}. Give "
                f"algorithm.count_noise above {noise / 2:g}, or leave algorithm.quantile out"
            )
        return left**-0.5

    def share(self, within: int, replies: int, noise: float, expected: float) -> float:
        """The noisy share of updates within the bound; `noise` is a standard normal number."""
        return self.limited(0.5 + (within - replies / 2 + self.deviation(expected) * noise) / expected)

    def limited(self, found: float) -> float:
        """A noisy share, clamped around the quantile."""
        return min(max(found, self.quantile - FARTHEST), self.quantile + FARTHEST)

    def next(self, bound: float, share: float) -> float:
        """The bound of the next round."""
        return bound * math.exp(-self.lr * (share - self.quantile))
