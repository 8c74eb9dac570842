"""Quantity skew: the same distribution, different numbers of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from consilience.core.rng import host
from consilience.core.settings import Count, Invalid, NonNegative, OnlyWith, Whole, check
from consilience.data.partition.apportion import apportion, by_owner, refuse_too_few, row_count

Skew = Literal["equal", "power_law", "log_normal", "half_normal"]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Shuffled rows in parts of unequal size; `kind` says how the sizes spread, "sizes" takes them as given.

    power_law: the r-th largest client holds rows in proportion to r^-exponent (which client is r-th drawn);
    log_normal: exp(sigma z), z standard normal; half_normal: |z|. With `allow_rest`, sizes may leave rows.
    """

    clients: Count
    kind: Literal["power_law", "log_normal", "half_normal", "sizes"] = "power_law"
    exponent: Annotated[NonNegative, OnlyWith("kind", ("power_law",))] = 1.0
    sigma: Annotated[NonNegative, OnlyWith("kind", ("log_normal",))] = 1.0
    min_size: Whole = 1
    sizes: tuple[Whole, ...] | None = None
    allow_rest: bool = False

    def __post_init__(self) -> None:
        check(self)
        if (self.kind == "sizes") != (self.sizes is not None):
            raise Invalid(f"Quantity.sizes = {self.sizes!r} goes with kind = 'sizes', and only with it")
        if self.sizes is not None and len(self.sizes) != self.clients:
            raise Invalid(f"Quantity.sizes has {len(self.sizes)} values for clients = {self.clients}: give one each")
        if self.allow_rest and self.kind != "sizes":
            raise Invalid(f"Quantity.allow_rest = true goes with kind = 'sizes', not with {self.kind!r}")

    def split(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> list[np.ndarray]:
        """Row numbers per client."""
        total = row_count(labels)
        sizes = self._given(total) if self.sizes is not None else self._drawn(total, seed)
        rows = host(seed, "quantity rows").permutation(total)[: sizes.sum()]
        return by_owner(np.repeat(np.arange(self.clients), sizes), rows, self.clients)

    def _given(self, total: int) -> np.ndarray:
        asked = sum(self.sizes or ())
        if asked > total or (asked < total and not self.allow_rest):
            remedy = "give sizes that add up to it" + (", or set allow_rest" if asked < total else "")
            raise Invalid(f"Quantity.sizes ask for {asked} rows, but there are {total}: {remedy}")
        return np.array(self.sizes, dtype=np.int64)

    def _drawn(self, total: int, seed: int) -> np.ndarray:
        refuse_too_few("Quantity.min_size", self.min_size, self.clients, total)
        rng = host(seed, "quantity sizes")
        assert self.kind != "sizes"
        weights = skewed(self.kind, self.clients, rng, exponent=self.exponent, sigma=self.sigma)
        return apportion(total, weights, least=self.min_size)


def skewed(skew: Skew, clients: int, rng: np.random.Generator, *, exponent: float, sigma: float) -> np.ndarray:
    """How much each client holds, up to a constant, [clients]."""
    if skew == "equal":
        return np.ones(clients)
    if skew == "power_law":
        logarithms = -exponent * np.log(rng.permutation(np.arange(1, clients + 1)))
    elif skew == "log_normal":
        logarithms = sigma * rng.standard_normal(clients)
    else:
        return np.abs(rng.standard_normal(clients))
    return np.exp(logarithms - logarithms.max())
