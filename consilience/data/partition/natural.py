"""The natural clients of the data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.rng import host
from consilience.core.settings import Checked, Count, Invalid, Whole
from consilience.data.partition.apportion import row_count
from consilience.data.partition.assignment import Assignment


@dataclass(frozen=True, kw_only=True)
class Natural(Checked):
    """One client per natural group (hospital, person, role, style), in the groups' order.

    `min_size` leaves out groups with fewer rows; `max_clients` keeps that many groups, drawn at random.
    """

    min_size: Whole = 0
    max_clients: Count | None = None

    def split(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> list[np.ndarray]:
        """Row numbers per client."""
        return self.assign(labels, groups=groups, seed=seed).parts

    def assign(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> Assignment:
        """Rows per client, and which group each one is."""
        found, parts = rows_by_group(labels, groups, "natural")
        sizes = np.array([len(part) for part in parts])
        kept = np.flatnonzero(sizes >= self.min_size)
        if len(kept) == 0:
            raise Invalid(
                f"Natural.min_size = {self.min_size} leaves no client: the largest group has "
                f"{sizes.max()} rows, the median one {int(np.median(sizes))}"
            )
        if self.max_clients is not None and len(kept) > self.max_clients:
            kept = np.sort(host(seed, "natural").choice(kept, self.max_clients, replace=False))
        return Assignment(parts=[parts[i] for i in kept], owners=[int(found[i]) for i in kept], shifts=[()] * len(kept))


def rows_by_group(labels: np.ndarray, groups: np.ndarray | None, partition: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """The groups that occur, ascending, and each one's rows; data without groups are refused."""
    total = row_count(labels)
    if groups is None:
        raise Invalid(
            f"{partition} needs data that say which natural client owns each row, and these do not: "
            f"use iid, dirichlet, classes_per_client, shards or quantity"
        )
    if groups.shape != (total,):
        raise Invalid(f"groups has shape {groups.shape} for {total} rows: give one group number a row")
    found, counts = np.unique(groups, return_counts=True)
    order = np.argsort(groups, kind="stable").astype(np.int64)
    return found, np.split(order, np.cumsum(counts)[:-1])
