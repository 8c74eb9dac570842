"""Distributed noise: in a secure sum every client clips its own update and adds a share of the noise.

So the server never sees a sum without noise and need not be trusted with one. A share is sized for the smallest number
of nodes whose sum can be unmasked, minus the colluding ones; more nodes mean more noise.
Two federations are neighbours if a client has rows in one and none in the other, where it sends zeros and noise: the
set of participants and of missing replies is public and must not depend on rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from consilience.core.settings import Count, Invalid, Positive, Whole, check
from consilience.privacy.adaptive_bound import AdaptiveBound
from consilience.privacy.discrete_gaussian import LEAST_DEVIATION, MOST_DEVIATION, sample
from consilience.privacy.round_keys import fresh

ROOM = 10.0  # deviations of a sum's noise that must fit in addition to the values
SHORTER = 1 - 1e-9  # factor on a bound, so that float64 rounding cannot exceed it


@dataclass(frozen=True, kw_only=True)
class NoiseShares:
    """Together at least N(0, (noise D)^2) on every value, where no client moves the sum by more than D.

    noise: in units of the longest contribution. clients: in the federation. colluding: number of nodes that may tell
    the server their noise. adaptive: each contribution has one more value, from which the bound is adapted.
    """

    noise: Positive
    clients: Count
    colluding: Whole = 0
    adaptive: AdaptiveBound | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.adaptive is not None:
            self.adaptive.update_noise(self.noise, self.clients)  # refuses where there is no such noise

    def count_scale(self, bound: float) -> float:
        """What the value (1 or 0) - 1/2 is multiplied by, so that its noise has the deviation that it needs."""
        if self.adaptive is None:
            return 0.0
        return self.adaptive.update_noise(self.noise, self.clients) * bound / self.adaptive.deviation(self.clients)

    def length(self, bound: float) -> float:
        """The norm of the longest contribution: an update of norm `bound`, and the count's value."""
        return math.hypot(bound, self.count_scale(bound) / 2)

    def contribution(self, update: np.ndarray, bound: float) -> np.ndarray:
        """[d], or [d + 1] with a count: the clipped update; zeros if it is not finite, to hide that."""
        refuse_bound(bound)
        with np.errstate(over="ignore", invalid="ignore"):
            length = float(np.linalg.norm(update))
        if not math.isfinite(length):
            return np.zeros(len(update) + (self.adaptive is not None))
        clipped = update * min(1.0, bound * SHORTER / max(length, np.finfo(np.float64).tiny))
        if self.adaptive is None:
            return clipped
        return np.append(clipped, self.count_scale(bound) * (0.5 if length <= bound else -0.5))

    def deviation(self, bound: float, *, step: float, values: int, needed: int) -> float:
        """Of one client's share, in levels of `step`: each value was rounded up or down to one, by less than 1."""
        refuse_bound(bound)
        honest = needed - self.colluding
        if honest < 1:
            raise Invalid(
                f"a sum of {needed} nodes, of which {self.colluding} may tell their noise (deploy.secure_colluding), "
                "hides nothing: raise deploy.secure_threshold"
            )
        found = self.noise * (self.length(bound) / step + math.sqrt(values)) / math.sqrt(honest)
        if not LEAST_DEVIATION <= found <= MOST_DEVIATION:
            raise Invalid(
                f"one client's noise would have a deviation of {found:.3g} levels, which must be at least "
                f"{LEAST_DEVIATION:g} and at most {MOST_DEVIATION:.3g}: change deploy.secure_levels"
            )
        return found

    def drawn(self, bound: float, *, step: float, values: int, needed: int) -> np.ndarray:
        """[values] int64: one client's share, from a key of the operating system that is used once and not kept."""
        return sample(fresh(0), "share", values, self.deviation(bound, step=step, values=values, needed=needed))

    def longest_sum(self, bound: float, *, step: float, values: int, needed: int, nodes: int) -> float:
        """A bound on a sum of this many clipped contributions and their noise, exceeded in one of 10^21 cases."""
        share = step * self.deviation(bound, step=step, values=values, needed=needed)
        rounded = step * math.sqrt(values)
        return nodes * (self.length(bound) + rounded) + math.sqrt(nodes) * share * (math.sqrt(values) + ROOM)

    def most_bound(self, *, clip: float, needed: int) -> float:
        """The largest bound at which values and noise of a sum fit into the integers."""
        beside = ROOM * self.noise * self.length(1.0) / max(needed - self.colluding, 1)
        return clip / (1 + beside)


def refuse_bound(bound: float) -> None:
    """Refuse an invalid bound."""
    if not 0 < bound < math.inf:
        raise Invalid(f"an update cannot be clipped to a length of {bound}")
