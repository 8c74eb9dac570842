"""Clients that lack one of the modalities of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from consilience.core.rng import host
from consilience.core.settings import Checked, Invalid, OnlyWith, Probability, Whole
from consilience.data.partition.assignment import Assignment, Partition, assign
from consilience.data.partition.shifts import Missing


@dataclass(frozen=True, kw_only=True)
class MissingModality(Checked):
    """`inner` assigns the rows; some clients then lack `modality`, in training and test rows.

    They are a random `share` of the clients, rounded to the nearest number, or those whose numbers are in `lacking`.
    """

    inner: Partition
    modality: str
    share: Annotated[Probability, OnlyWith("lacking", (None,))] = 0.5
    lacking: tuple[Whole, ...] | None = None

    def split(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> list[np.ndarray]:
        """Row numbers per client."""
        return self.assign(labels, groups=groups, seed=seed).parts

    def assign(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> Assignment:
        """Rows per client, and which clients lack the modality."""
        inner = assign(self.inner, labels, groups=groups, seed=seed)
        without = self._without(len(inner.parts), seed)
        missing = Missing(modality=self.modality)
        shifts = [(*earlier, missing) if k in without else earlier for k, earlier in enumerate(inner.shifts)]
        return Assignment(parts=inner.parts, owners=inner.owners, shifts=shifts)

    def _without(self, count: int, seed: int) -> set[int]:
        if self.lacking is None:
            drawn = host(seed, "missing modality").permutation(count)
            return set(drawn[: int(self.share * count + 0.5)].tolist())
        unknown = [client for client in self.lacking if client >= count]
        if unknown:
            raise Invalid(f"MissingModality.lacking names client {unknown[0]}, but there are {count}: 0 .. {count - 1}")
        return set(self.lacking)
