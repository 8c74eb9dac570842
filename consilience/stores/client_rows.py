"""One row of named tensors per client, versioned: only clients that were written take memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.remote import RemoteTensor
from consilience.core.tree import Tree
from consilience.core.versions import ClientVector, Mark

NOWHERE = -1
_AT_ONCE = 128 << 20  # bytes copied at a time from one storage to another


class RowStorage(Protocol):
    """Rows in numbered slots, each written once and then freed."""

    @property
    def initial(self) -> Tree:
        """The row of a client that has none."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that rows are read to."""
        ...

    def put(self, rows: Any, count: int) -> np.ndarray:
        """Store [m, ...] rows and return their slots."""
        ...

    def get(self, slots: np.ndarray) -> Tree:
        """[m, ...] the rows of these slots; `NOWHERE` gives the initial row."""
        ...

    def column(self, slots: np.ndarray, path: str) -> Tensor:
        """[m, ...] one tensor of these rows."""
        ...

    def release(self, slots: np.ndarray) -> None:
        """Free slots; `NOWHERE` is ignored."""
        ...

    def fresh(self) -> RowStorage:
        """An empty storage of this kind."""
        ...


class ClientRows:
    """One version of all clients' rows; `write` returns the next version and does not change this one.

    A changed row gets a new slot; the old slot is freed when no version uses it. So a round reads and writes only its
    cohort's rows.
    """

    def __init__(self, storage: RowStorage, clients: int) -> None:
        self.storage = storage
        self._slots = ClientVector.filled(clients, NOWHERE, np.int64)

    @staticmethod
    def of(values: Tree) -> ClientRows | None:
        """The rows behind a tree returned by `tree`; None for other trees."""
        first = next(iter(tree.leaves(values)), None)
        column = first.source if isinstance(first, RemoteTensor) and first.rows is None else None
        return column.table if isinstance(column, Column) else None

    @staticmethod
    def at_slots(storage: RowStorage, slots: np.ndarray) -> ClientRows:
        """From [K] slots that already hold the clients' rows."""
        table = ClientRows(storage, 0)
        table._slots = ClientVector(slots, NOWHERE)
        return table

    @staticmethod
    def dense(values: Tree, storage: RowStorage) -> ClientRows:
        """From a tree stacked [K, ...]."""
        clients = len(next(iter(tree.leaves(values))))
        table = ClientRows(storage, clients)
        for ids in _pieces(np.arange(clients), tree.nbytes(storage.initial)):
            table = table.write(ids, tree.to(tree.take(values, ids), storage.device))
        return table

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def initial(self) -> Tree:
        """The row of a client that was never written."""
        return self.storage.initial

    def read(self, ids: np.ndarray) -> Tree:
        """[m, ...] the rows of some clients, on the device."""
        return self.storage.get(self._slots[ids])

    def column(self, ids: np.ndarray, path: str) -> Tensor:
        """[m, ...] one tensor of the rows of some clients."""
        return self.storage.column(self._slots[ids], path)

    def slots(self, ids: np.ndarray) -> np.ndarray:
        """[m] the slots of some clients' rows."""
        return self._slots[ids]

    def write(self, ids: np.ndarray, rows: Any) -> ClientRows:
        """The next version, with new rows [m, ...] for these clients, each listed once."""
        if not len(ids):
            return self
        if not self._slots.is_newest:
            return self.copied(self.storage.fresh()).write(ids, rows)
        after = object.__new__(ClientRows)
        after.storage = self.storage
        slots = self.storage.put(rows, len(ids))
        after._slots = self._slots.write(ids, slots, released=self.storage.release)
        return after

    def copied(self, storage: RowStorage) -> ClientRows:
        """The same rows in another storage."""
        table = ClientRows(storage, len(self))
        for ids in _pieces(self.written(), tree.nbytes(self.initial)):
            table = table.write(ids, tree.to(self.read(ids), storage.device))
        return table

    def written(self) -> np.ndarray:
        """Ascending ids of the clients that have a row."""
        return self._slots.written()

    @property
    def mark(self) -> Mark:
        """A mark to pass to `changed_since` of a later version."""
        return self._slots.mark

    def changed_since(self, mark: Mark | None) -> np.ndarray | None:
        """Ascending ids of the clients whose rows may have changed; None if unknown."""
        return self._slots.changed_since(mark)

    def tree(self) -> Tree:
        """As a tree stacked [K, ...], whose rows are read on demand."""
        flat = {  # not cached: a reference from here would keep old versions until cycles are collected
            path: RemoteTensor.whole(Column(self, path), len(self), one.shape, one.dtype, self.storage.device)
            for path, one in tree.flatten(self.initial).items()
        }
        return tree.shaped_like(self.initial, flat)


class Column:
    """One tensor of all clients' rows."""

    place = None
    lengths = None
    lasting = True

    def __init__(self, table: ClientRows, path: str) -> None:
        self.table, self.path = table, path

    def fetch(self, rows: np.ndarray) -> Tensor:
        """[n, ...] the values of these clients."""
        return self.table.column(rows, self.path)


def _pieces(ids: np.ndarray, length: int) -> Iterator[np.ndarray]:
    many = max(1, _AT_ONCE // max(length, 1))
    for begin in range(0, len(ids), many):
        yield ids[begin : begin + many]
