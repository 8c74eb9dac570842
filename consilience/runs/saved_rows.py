"""Client rows of a checkpoint, read on demand from the file that `client_log` wrote."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.tree import Tree
from consilience.core.versions import ClientVector
from consilience.runs.client_log import AT_ONCE, LogEntry, TableEntry
from consilience.runs.disk import open_file
from consilience.stores.block_storage import BlockStorage, RowLayout
from consilience.stores.client_rows import NOWHERE, ClientRows

_CPU = torch.device("cpu")


def read_log(path: Path, entry: LogEntry, tables: Sequence[TableEntry]) -> dict[tuple[str, str], Tensor]:
    """The tensors of all tables, by tree and path; rows are read from the file on demand.

    `ValueError` with the reason if the file is not what the manifest says.
    """
    fd = open_file(path, os.O_RDONLY)
    file = _OpenFile(fd)
    size = os.fstat(fd).st_size
    if size < entry.bytes:
        raise ValueError(f"it holds {size} bytes where at least {entry.bytes} were written")
    digest = hashlib.sha256()
    for begin in range(0, entry.bytes, AT_ONCE):
        digest.update(file.read(begin, min(AT_ONCE, entry.bytes - begin)))
    if digest.hexdigest() != entry.sha256:
        raise ValueError("its SHA-256 digest is not the one that was written")
    layouts = [RowLayout(_example(table)) for table in tables]
    slots = [np.full(table.clients, NOWHERE, dtype=np.int64) for table in tables]
    first: dict[int, Tree] = {}
    at = 0
    while at < entry.bytes:
        number, count = np.frombuffer(file.read(at, 16), dtype="<i8").tolist()
        if not 0 <= number < len(tables) or count < 0 or count > entry.bytes:
            raise ValueError(f"the record at byte {at} is of no table")
        length, begin = layouts[number].length, at + 16 + 8 * count
        if begin + count * length > entry.bytes:
            raise ValueError(f"the record at byte {at} is longer than the file")
        ids = np.frombuffer(file.read(at + 16, 8 * count), dtype="<i8")
        if number not in first:
            if ids.tolist() != [NOWHERE]:
                raise ValueError(f"the record at byte {at} does not say what clients begin with")
            row = torch.frombuffer(bytearray(file.read(begin, length)), dtype=torch.uint8).unsqueeze(0)
            first[number] = tree.rows(layouts[number].unpack(row), 0)
        else:
            if count and (ids[0] < 0 or ids[-1] >= tables[number].clients or (np.diff(ids) <= 0).any()):
                raise ValueError(f"the record at byte {at} names clients that do not exist, or one twice")
            slots[number][ids] = begin + np.arange(count) * length
        at = begin + count * length
    if len(first) < len(tables):
        raise ValueError("a table is missing")
    found: dict[tuple[str, str], Tensor] = {}
    for number, table in enumerate(tables):
        rows = ClientRows.at_slots(SavedRows(file, layouts[number], first[number]), slots[number])
        leaves = [_vector(rows)] if table.is_vector else tree.flatten(rows.tree()).values()
        found.update({(table.tree, path): leaf for path, leaf in zip(table.paths, leaves)})
    return found


def _vector(rows: ClientRows) -> Tensor:
    """One number per client, in memory."""
    initial = rows.initial["value"].numpy()[()]
    values = np.full(len(rows), initial, dtype=rows.initial["value"].numpy().dtype)
    ids = rows.written()
    if len(ids):
        values[ids] = rows.column(ids, "value").numpy()
    return ClientVector(values, initial).leaf()


def _example(table: TableEntry) -> Tree:
    return tree.unflatten({path: torch.empty(shape, dtype=dtype) for path, dtype, shape in table.fields})


class _OpenFile:
    """A file that stays readable after its name is removed."""

    def __init__(self, fd: int) -> None:
        self._file = open(fd, "rb", buffering=0)  # noqa: SIM115

    def read(self, at: int, count: int) -> bytes:
        parts = []
        while count:
            part = os.pread(self._file.fileno(), count, at)
            if not part:
                raise OSError(errno.EIO, "the file is shorter than it was")
            parts.append(part)
            at, count = at + len(part), count - len(part)
        return b"".join(parts)


class SavedRows:
    """Rows in a file that was checked; a slot is the byte at which a row begins. They are copied before they change."""

    device = _CPU

    def __init__(self, file: _OpenFile, layout: RowLayout, initial: Tree) -> None:
        self._file, self._layout, self.initial = file, layout, initial

    def fresh(self) -> BlockStorage:
        """An empty storage that can be written to."""
        return BlockStorage(self.initial, _CPU)

    def put(self, rows: Any, count: int) -> np.ndarray:
        """Nothing is added to a saved file: `ClientRows.copied` first."""
        raise TypeError("rows of a checkpoint are read only")

    def get(self, slots: np.ndarray) -> Tree:
        """[m, ...] the rows of these slots."""
        data = self._layout.pack(tree.repeat(self.initial, len(slots)), len(slots), _CPU)
        for place in np.flatnonzero(slots != NOWHERE).tolist():
            row = self._file.read(int(slots[place]), self._layout.length)
            data[place] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        return self._layout.unpack(data)

    def column(self, slots: np.ndarray, path: str) -> Tensor:
        """[m, ...] one tensor of these rows."""
        return tree.flatten(self.get(slots))[path]

    def release(self, slots: np.ndarray) -> None:
        """Nothing is freed in a saved file."""
