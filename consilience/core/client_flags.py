"""One flag per client, stored sparsely: only clients whose flag is False take memory."""

from __future__ import annotations

from typing import Any

import numpy as np

_NONE = np.empty(0, dtype=np.int64)


class AllBut:
    """[K] flags, False for the clients in `away` (ascending, none twice) and True for all others."""

    def __init__(self, clients: int, away: np.ndarray = _NONE) -> None:
        self._clients, self.away = clients, away

    def __len__(self) -> int:
        return self._clients

    @property
    def count(self) -> int:
        """How many are True."""
        return self._clients - len(self.away)

    def __getitem__(self, ids: Any) -> Any:
        """The flags of some clients."""
        if isinstance(ids, slice) or (np.ndim(ids) and np.asarray(ids).dtype == np.bool_):
            return self.dense()[ids]
        return ~np.isin(ids, self.away)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.dense().astype(dtype or np.bool_, copy=False)

    def dense(self) -> np.ndarray:
        """[K] all flags."""
        flags = np.ones(self._clients, dtype=bool)
        flags[self.away] = False
        return flags

    def without(self, ids: np.ndarray) -> AllBut:
        """The same flags, with those of these clients set to False as well."""
        return AllBut(self._clients, np.union1d(self.away, ids))

    def at(self, places: np.ndarray) -> np.ndarray:
        """The clients at these positions in the ascending list of clients whose flag is True."""
        before = self.away - np.arange(len(self.away))  # clients with a True flag before each of them
        return places + np.searchsorted(before, places, side="right")
