"""A partition from a file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.settings import Checked, Invalid
from consilience.data.partition.apportion import row_count
from consilience.data.partition.storage import load, read_arrays


@dataclass(frozen=True, kw_only=True)
class Stored(Checked):
    """Row numbers from a file: one of `save`'s or, with a `prefix`, an `.npz` of `<prefix>_client<k>` arrays.

    Rows that the file does not name are left out; the order within a client is the file's.
    """

    path: str
    prefix: str = ""

    def split(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> list[np.ndarray]:
        """Row numbers per client."""
        parts = self._named() if self.prefix else load(self.path)
        total = row_count(labels)
        rows = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        if len(rows) and (rows.min() < 0 or rows.max() >= total):
            bad = rows.min() if rows.min() < 0 else rows.max()
            raise Invalid(f"Stored.path = {self.path!r} names row {bad}, but the data have rows 0 to {total - 1}")
        if len(np.unique(rows)) != len(rows):
            values, counts = np.unique(rows, return_counts=True)
            raise Invalid(f"Stored.path = {self.path!r} gives row {values[counts > 1][0]} to more than one place")
        return parts

    def _named(self) -> list[np.ndarray]:
        arrays = read_arrays(self.path)
        parts: list[np.ndarray] = []
        while (name := f"{self.prefix}_client{len(parts)}") in arrays:
            if arrays[name].ndim != 1 or not np.issubdtype(arrays[name].dtype, np.integer):
                raise Invalid(f"{self.path}: {name} must be a list of row numbers, not {arrays[name].dtype}")
            parts.append(arrays[name].astype(np.int64))
        if not parts:
            known = sorted({name.rpartition("_client")[0] for name in arrays if "_client" in name})
            raise Invalid(f"Stored.prefix = {self.prefix!r} is not in {self.path}: it has {', '.join(known) or 'none'}")
        return parts
