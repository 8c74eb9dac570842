"""Different kinds of clients in one federation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.rng import host, subseed
from consilience.core.settings import Fraction, Invalid, check
from consilience.data.partition.apportion import apportion, row_count
from consilience.data.partition.assignment import Assignment, Partition, assign


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Partitions side by side: each gets its share of the shuffled rows and splits it among its own clients.

    `((0.5, Iid(clients=10)), (0.5, Dirichlet(clients=10, alpha=0.1)))`: twenty clients, half of them alike.
    """

    parts: tuple[tuple[Fraction, Partition], ...]

    def __post_init__(self) -> None:
        check(self)
        total = sum(share for share, _ in self.parts)
        if abs(total - 1) > 1e-6:
            raise Invalid(f"Mixture.parts have shares that add up to {total:g}: they must add up to 1")

    def split(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> list[np.ndarray]:
        """Row numbers per client."""
        return self.assign(labels, groups=groups, seed=seed).parts

    def assign(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> Assignment:
        """The components' clients, one component after the other."""
        total = row_count(labels)
        sizes = apportion(total, [share for share, _ in self.parts])
        order = host(seed, "mixture").permutation(total).astype(np.int64)
        together = Assignment(parts=[], owners=[], shifts=[])
        for i, (rows, (share, inner)) in enumerate(zip(np.split(order, np.cumsum(sizes)[:-1]), self.parts)):
            rows = np.sort(rows)
            if len(rows) == 0:
                raise Invalid(f"Mixture.parts[{i}] has share {share:g} of {total} rows, which is none: raise it")
            of_rows = groups[rows] if groups is not None else None
            try:
                inner_assigned = assign(inner, labels[rows], groups=of_rows, seed=subseed(seed, "mixture", i))
            except Invalid as problem:
                raise Invalid(f"Mixture.parts[{i}] cannot split its {len(rows)} rows: {problem}") from problem
            together.parts.extend(rows[part] for part in inner_assigned.parts)
            together.owners.extend(inner_assigned.owners)
            together.shifts.extend(inner_assigned.shifts)
        return together
