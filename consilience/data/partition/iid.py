"""Independent and identically distributed rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.rng import host
from consilience.core.settings import Checked, Count
from consilience.data.partition.apportion import row_count


@dataclass(frozen=True, kw_only=True)
class Iid(Checked):
    """Shuffled rows in parts of equal size (to within one); clients beyond the number of rows stay empty."""

    clients: Count

    def split(self, labels: np.ndarray, *, groups: np.ndarray | None, seed: int) -> list[np.ndarray]:
        """Row numbers per client."""
        order = host(seed, "iid").permutation(row_count(labels)).astype(np.int64)
        return [np.sort(part) for part in np.array_split(order, self.clients)]
