"""Feature shift: the inputs differ from client to client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from consilience.core.rng import subseed
from consilience.core.settings import Invalid, NonNegative, OnlyWith, check
from consilience.data.partition.assignment import Assignment, Partition, assign
from consilience.data.partition.natural import rows_by_group
from consilience.data.partition.shifts import Noise, Rotation, Shift


@dataclass(frozen=True, kw_only=True)
class FeatureShift:
    """`inner` assigns the rows; each client's training and test inputs are then changed in its own way.

    rotation: client k's pictures are turned by `angles[k mod len(angles)]` degrees, counter-clockwise.
    noise: client k = 1..K gets Gaussian noise of deviation `sigma` k / K (NIID-Bench, Li et al. 2022).
    domain: the shift is in the data; `inner` splits each natural group (Iid(clients=3): three clients each).
    """

    inner: Partition
    kind: Literal["rotation", "noise", "domain"]
    angles: Annotated[tuple[float, ...], OnlyWith("kind", ("rotation",))] = (0.0, 90.0, 180.0, 270.0)
    sigma: Annotated[NonNegative, OnlyWith("kind", ("noise",))] = 0.1

    def __post_init__(self) -> None:
        check(self)
        if not self.angles or not np.isfinite(self.angles).all():
            raise Invalid(f"FeatureShift.angles = {self.angles!r} must be one or more finite numbers of degrees")

    def split(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> list[np.ndarray]:
        """Row numbers per client."""
        return self.assign(labels, groups=groups, seed=seed).parts

    def assign(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> Assignment:
        """Rows per client, and each client's shift."""
        if self.kind == "domain":
            return self._by_domain(labels, groups, seed)
        inner = assign(self.inner, labels, groups=groups, seed=seed)
        clients = len(inner.parts)
        shifts = [(*earlier, self._shift(k, clients)) for k, earlier in enumerate(inner.shifts)]
        return Assignment(parts=inner.parts, owners=inner.owners, shifts=shifts)

    def _shift(self, client: int, clients: int) -> Shift:
        if self.kind == "rotation":
            return Rotation(angle=self.angles[client % len(self.angles)])
        return Noise(sigma=self.sigma * (client + 1) / clients)

    def _by_domain(self, labels: np.ndarray, groups: np.ndarray | None, seed: int) -> Assignment:
        found, domains = rows_by_group(labels, groups, "feature_shift with kind = 'domain'")
        parts: list[np.ndarray] = []
        owners: list[int | None] = []
        shifts: list[tuple[Shift, ...]] = []
        for group, rows in zip(found, domains):
            try:
                inner = assign(self.inner, labels[rows], groups=None, seed=subseed(seed, "domain", int(group)))
            except Invalid as problem:
                raise Invalid(f"FeatureShift.inner cannot split group {group}: {problem}") from problem
            parts += [rows[part] for part in inner.parts]
            owners += [int(group)] * len(inner.parts)
            shifts += inner.shifts
        return Assignment(parts=parts, owners=owners, shifts=shifts)
