"""One number per client, versioned: a write costs only the changed entries, and older versions keep their values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from consilience.core.remote import RemoteTensor

COPIED = 1 << 16  # bytes up to which `leaf` copies all values
_MOST_REMEMBERED = 1 << 20  # ids in the list of changes before it is merged into one entry


class ClientVector:
    """One version of [K] numbers; `write` returns the next version.

    All versions share one array with the newest values. An older version stores the values that the next version
    replaced, so it costs memory only while something refers to it. It is the source of the tensor that `leaf` gives of
    many clients.
    """

    place = None
    lengths = None
    lasting = True

    def __init__(self, values: np.ndarray, initial: Any) -> None:
        """`initial`: the value of clients that were never written, which checkpoints omit."""
        self._shared, self.initial = _Shared(np.array(values)), initial
        self._version = _Version(0)

    @staticmethod
    def filled(clients: int, initial: Any, dtype: Any) -> ClientVector:
        """A vector with the same value for all clients."""
        return ClientVector(np.full(clients, initial, dtype=dtype), initial)

    @staticmethod
    def of(values: Any, initial: Any) -> ClientVector:
        """From an array, or from the tensor that `leaf` gave."""
        if isinstance(values, ClientVector):
            return values
        if isinstance(values, RemoteTensor) and isinstance(values.source, ClientVector):
            return values.source
        if isinstance(values, torch.Tensor):  # a checkpoint is placed on the engine's device
            values = values.numpy(force=True)
        return ClientVector(np.asarray(values), initial)

    def __len__(self) -> int:
        return len(self._shared.values)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the numbers."""
        return self._shared.values.dtype

    @property
    def is_newest(self) -> bool:
        """Whether no version follows this one."""
        return self._version.next is None

    def __getitem__(self, ids: Any) -> Any:
        """The values of some clients."""
        if self.is_newest:
            return self._shared.values[ids].copy()
        asked = (
            np.arange(len(self))[ids] if isinstance(ids, slice) or (np.ndim(ids) and _flags(ids)) else np.asarray(ids)
        )
        found = np.atleast_1d(self._shared.values[asked])
        flat, known = np.atleast_1d(asked) % len(self), np.zeros(np.size(asked), dtype=bool)
        for version in self._later():
            place = np.minimum(np.searchsorted(version.ids, flat), len(version.ids) - 1)
            here = ~known & (version.ids[place] == flat)
            found[here] = version.before[place[here]]
            known |= here
        return found if np.ndim(asked) else found[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.dense().astype(dtype or self.dtype, copy=False)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dense())

    def dense(self) -> np.ndarray:
        """[K] a copy of all values."""
        values = self._shared.values.copy()
        for version in reversed(list(self._later())):
            values[version.ids] = version.before
        return values

    def view(self) -> np.ndarray:
        """[K] all values, read-only and valid until the next version is written."""
        if not self.is_newest:
            return self.dense()
        values = self._shared.values.view()
        values.flags.writeable = False
        return values

    copy = dense

    def tobytes(self) -> bytes:
        """As `numpy.ndarray.tobytes`."""
        return self.dense().tobytes()

    def write(
        self, ids: np.ndarray, values: Any, *, released: Callable[[np.ndarray], None] | None = None
    ) -> ClientVector:
        """The next version, with new values for these clients, each listed once.

        released: called with the replaced values once no version refers to them.
        """
        if not self.is_newest:
            return ClientVector(self.dense(), self.initial).write(ids, values)
        ids = np.asarray(ids, dtype=np.int64)
        order = np.argsort(ids, kind="stable")
        after = object.__new__(ClientVector)
        after._shared, after.initial = self._shared, self.initial
        after._version = _Version(self._version.number + 1)
        if len(ids):
            before = self._shared.values[ids[order]]
            self._version.ids, self._version.before, self._version.next = ids[order], before, after._version
            self._shared.values[ids] = values
            self._shared.note(after._version.number, ids[order])
            if released is not None:
                weakref.finalize(self._version, released, before).atexit = False
        else:
            after._version = self._version
        return after

    def written(self) -> np.ndarray:
        """Ascending ids of the clients whose value is not the initial one."""
        values = self.view()
        return np.flatnonzero(values == values if self.initial != self.initial else values != self.initial)

    @property
    def mark(self) -> Mark:
        """A mark to pass to `changed_since` of a later version."""
        return weakref.ref(self._shared), self._version.number

    def changed_since(self, mark: Mark | None) -> np.ndarray | None:
        """Ascending ids that may have changed; None if unknown."""
        if mark is None or mark[0]() is not self._shared:
            return None
        later = [ids for number, ids in self._shared.changes if number > mark[1]]
        return np.unique(np.concatenate(later)) if later else np.empty(0, dtype=np.int64)

    def leaf(self) -> torch.Tensor:
        """As a tensor [K] for checkpoints: a copy of few values; many are read on demand."""
        if self._shared.values.nbytes <= COPIED:
            return torch.from_numpy(self[:])
        values = torch.from_numpy(self._shared.values)
        return RemoteTensor.whole(self, len(values), (), values.dtype, values.device)

    def fetch(self, rows: np.ndarray) -> torch.Tensor:
        """[n] these clients' values."""
        return torch.from_numpy(self[rows])

    def _later(self) -> Iterator[_Version]:
        version = self._version
        while version.next is not None:
            yield version
            version = version.next


class _Shared:
    """The newest values, and which clients changed in which version."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.changes: list[tuple[int, np.ndarray]] = []
        self._noted = 0

    def note(self, number: int, ids: np.ndarray) -> None:
        self.changes.append((number, ids))
        self._noted += len(ids)
        if self._noted > max(_MOST_REMEMBERED, 2 * len(self.values)):  # merge: may over-report changes
            self.changes = [(number, np.unique(np.concatenate([ids for _, ids in self.changes])))]
            self._noted = len(self.changes[0][1])


class _Version:
    """The values that the next version replaced; older versions refer to newer ones, never the reverse."""

    __slots__ = ("__weakref__", "before", "ids", "next", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ids = self.before = np.empty(0, dtype=np.int64)
        self.next: _Version | None = None


Mark = tuple["weakref.ref[_Shared]", int]
"""A point in the history of a vector."""


def _flags(ids: Any) -> bool:
    return bool(np.asarray(ids).dtype == np.bool_)
