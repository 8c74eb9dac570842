"""The result of a partition: rows per client and, if known, natural groups and feature shifts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from consilience.data.partition.shifts import Shift


@runtime_checkable
class Partition(Protocol):
    """Assigns disjoint rows to clients, as a function of labels, groups and seed only."""

    def split(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> list[np.ndarray]:
        """Row numbers per client."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment:
    """Per client: its rows, its natural group (None if it has no single one), its feature shifts in order."""

    parts: list[np.ndarray]
    owners: list[int | None]
    shifts: list[tuple[Shift, ...]]


def assign(partition: Partition, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> Assignment:
    """The full assignment; partitions with groups or shifts have an `assign` method of their own."""
    own = getattr(partition, "assign", None)
    if own is not None:
        return own(labels, groups=groups, seed=seed)
    parts = partition.split(labels, groups=groups, seed=seed)
    return Assignment(parts=parts, owners=[None] * len(parts), shifts=[()] * len(parts))
