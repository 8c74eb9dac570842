"""Label skew given explicitly: the classes of each client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.rng import host
from consilience.core.settings import Count, Invalid, check
from consilience.data.partition.apportion import apportion, deal, rows_by_class


@dataclass(frozen=True, kw_only=True)
class LabelSets:
    """Client k holds the classes `labels[k]`, and `sizes[k]` rows: as many of each (to within one).

    Without sizes, holders of a class share all of it equally. `allow_rest` permits rows that no client holds.
    """

    labels: tuple[tuple[int, ...], ...]
    sizes: tuple[Count, ...] | None = None
    allow_rest: bool = False

    def __post_init__(self) -> None:
        check(self)
        if not self.labels:
            raise Invalid("LabelSets.labels is empty: give one list of classes for each client")
        for k, held in enumerate(self.labels):
            if not held or len(set(held)) != len(held):
                raise Invalid(f"LabelSets.labels[{k}] = {held!r} must name at least one class, and none twice")
        if self.sizes is not None and len(self.sizes) != len(self.labels):
            raise Invalid(f"LabelSets.sizes has {len(self.sizes)} values for {len(self.labels)} clients: give one each")

    def split(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> list[np.ndarray]:
        """Row numbers per client."""
        classes, rows = rows_by_class(labels, "label_sets")
        place = {int(label): c for c, label in enumerate(classes)}
        for k, held in enumerate(self.labels):
            for label in held:
                if label not in place:
                    known = ", ".join(str(name) for name in place)
                    raise Invalid(f"LabelSets.labels[{k}] names class {label}, which the data lack: they have {known}")
        totals = np.array([len(of_class) for of_class in rows])
        counts = np.zeros((len(rows), len(self.labels)), dtype=np.int64)
        if self.sizes is None:
            for c, label in enumerate(classes):
                holders = [k for k, held in enumerate(self.labels) if label in held]
                counts[c, holders] = apportion(int(totals[c]), np.ones(len(holders))) if holders else 0
        else:
            for k, (held, size) in enumerate(zip(self.labels, self.sizes)):
                counts[[place[label] for label in held], k] = apportion(size, np.ones(len(held)))
        self._refuse_impossible(classes, totals, counts.sum(1))
        return deal(rows, counts, host(seed, "label_sets"))

    def _refuse_impossible(self, classes: np.ndarray, totals: np.ndarray, taken: np.ndarray) -> None:
        for label, total, asked in zip(classes, totals, taken):
            if asked > total:
                raise Invalid(
                    f"LabelSets.sizes ask for {asked} rows of class {label}, but there are {total}: "
                    f"scale the sizes by {total / asked:.3g} or less"
                )
            if asked < total and not self.allow_rest:
                raise Invalid(
                    f"LabelSets leaves {total - asked} of {total} rows of class {label} to nobody: "
                    f"set allow_rest if that is meant"
                )
