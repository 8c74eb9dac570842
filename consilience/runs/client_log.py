"""Client rows of checkpoints in one append-only file: a save adds the rows that changed since the last.

The file is a sequence of records: the number of a table, how many rows, their clients' numbers (ascending), the rows.
Each is little-endian int64 but for the rows, which are bytes. The first record of a table holds client -1: the row of
clients that have none. A later row of a client replaces an earlier one. A manifest says how many bytes of the file
belong to its checkpoint, and their digest; the rest belongs to later checkpoints, or was left by a crash.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.remote import RemoteTensor
from consilience.core.tree import Tree
from consilience.core.versions import ClientVector, Mark
from consilience.runs.disk import append_file, sync_folder, write_file
from consilience.stores.block_storage import BlockStorage, RowLayout
from consilience.stores.client_rows import NOWHERE, ClientRows, Column

WHOLE = 1 << 20  # bytes of all clients' rows up to which a checkpoint stores them itself
SLACK = 1 << 20  # bytes by which the file may exceed twice the size of the current rows
MOST_CLIENTS = 10**8
AT_ONCE = 32 << 20  # bytes that are read, or fetched from the device, together
_NAME = r"clients-(\d{8,18})\.log"
_CPU = torch.device("cpu")


class ClientTable(NamedTuple):
    """Rows of all clients in one of the trees to save."""

    tree: str
    prefix: str  # in front of its own paths in that tree; of a vector, its path
    source: ClientRows | ClientVector
    layout: RowLayout

    @property
    def initial(self) -> Tree:
        """The row of clients that have none."""
        if isinstance(self.source, ClientRows):
            return tree.to(self.source.initial, "cpu")
        return {"value": torch.from_numpy(np.array(self.source.initial, dtype=self.source.dtype))}

    @property
    def entry(self) -> TableEntry:
        """For the manifest."""
        fields = tuple((path, field.dtype, tuple(field.shape)) for path, field in self.layout.fields.items())
        is_vector = isinstance(self.source, ClientVector)
        return TableEntry(self.tree, self.prefix, is_vector, len(self.source), fields)

    def rows(self, ids: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor]]:
        """(ids, rows as bytes) in pieces."""
        length = self.layout.length
        many = max(1, AT_ONCE // length)
        for begin in range(0, len(ids), many):
            some = ids[begin : begin + many]
            if isinstance(self.source, ClientVector):
                values = torch.from_numpy(self.source[some])
                yield some, self.layout.pack({"value": values}, len(some), _CPU)
            elif isinstance(self.source.storage, BlockStorage):
                found = self.source.storage.bytes(self.source.slots(some))
                yield some, found.cpu()
            else:
                yield some, self.layout.pack(tree.to(self.source.read(some), "cpu"), len(some), _CPU)


class TableEntry(NamedTuple):
    """A table in a manifest."""

    tree: str
    prefix: str
    is_vector: bool
    clients: int
    fields: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]  # own path, type, shape

    @property
    def paths(self) -> tuple[str, ...]:
        """In the tree."""
        return (self.prefix,) if self.is_vector else tuple(self.prefix + path for path, _, _ in self.fields)


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """Which part of which file belongs to a checkpoint."""

    file: str
    bytes: int
    sha256: str


def tables_in(name: str, flat: Mapping[str, Tensor]) -> list[ClientTable]:
    """The tables among a tree's tensors that are too large to be written whole, and that say what has changed."""
    found: dict[int, tuple[Any, list[str]]] = {}
    for path, leaf in flat.items():
        if isinstance(leaf, RemoteTensor) and leaf.rows is None and isinstance(leaf.source, (Column, ClientVector)):
            source = leaf.source.table if isinstance(leaf.source, Column) else leaf.source
            found.setdefault(id(source), (source, []))[1].append(path)
    tables = []
    for source, paths in found.values():
        own = [""] if isinstance(source, ClientVector) else list(tree.flatten(source.initial))
        if isinstance(source, ClientVector):
            layout = _number_layout(source.dtype)
        else:
            layout = source.storage.layout if isinstance(source.storage, BlockStorage) else RowLayout(source.initial)
        table = ClientTable(name, paths[0].removesuffix(own[0]), source, layout)
        if paths == [table.prefix + path for path in own] and len(source) * table.layout.length > WHOLE:
            tables.append(table)
    return tables


@functools.cache
def _number_layout(dtype: np.dtype[Any]) -> RowLayout:
    """Rows of one number."""
    return RowLayout({"value": torch.from_numpy(np.empty((), dtype=dtype))})


class ClientLog:
    """Writes the file; one object for one run from its start, or resume, to its end.

    It begins a new file at its first save, when the tables have changed, and when the file is longer than twice the
    current rows. The old file stays until no checkpoint refers to it.
    """

    def __init__(self) -> None:
        self.may_exist = True  # whether the folder may hold such files, of this process or of an earlier one
        self._path: Path | None = None
        self._length, self._digest = 0, hashlib.sha256()
        self._bound = SLACK  # bytes up to which the file is not longer than twice the current rows
        self._known: list[TableEntry] = []
        self._saved: list[Mark] = []
        self._next: list[Mark] = []

    def append(self, root: Path, tables: Sequence[ClientTable]) -> LogEntry:
        """Add the changed rows, durably; call `commit` when the checkpoint that refers to them is durable, too."""
        known = [table.entry for table in tables]
        changed: list[np.ndarray | None] = [None] * len(tables)
        if self._path is not None and self._path.parent == root and known == self._known:
            changed = [table.source.changed_since(mark) for table, mark in zip(tables, self._saved)]
        if any(ids is None for ids in changed) or self._is_long(tables):
            self._begin(root, tables)
        else:
            self._add_all(record for n, pair in enumerate(zip(tables, changed)) for record in _records(n, *pair))
        self._known, self._next = known, [table.source.mark for table in tables]
        assert self._path is not None
        return LogEntry(file=self._path.name, bytes=self._length, sha256=self._digest.hexdigest())

    def commit(self) -> None:
        """Mark the rows added last as part of a checkpoint."""
        self._saved = self._next

    def _is_long(self, tables: Sequence[ClientTable]) -> bool:
        if self._length > self._bound:  # current rows are counted only here, since that visits all clients
            needed = sum((len(table.source.written()) + 1) * (table.layout.length + 8) for table in tables)
            self._bound = 2 * needed + SLACK
        return self._length > self._bound

    def _begin(self, root: Path, tables: Sequence[ClientTable]) -> None:
        """A new file with all rows."""
        self.may_exist = True
        taken = max((int(name[8:-4]) for name in log_files(root)), default=0)
        path = root / f"clients-{taken + 1:08d}.log"
        digest, length = hashlib.sha256(), 0

        def chunks() -> Iterator[bytes]:
            nonlocal length
            for number, table in enumerate(tables):
                first = table.layout.pack(tree.repeat(table.initial, 1), 1, _CPU)
                for record in (_record(number, np.array([NOWHERE]), first), *_records(number, table, None)):
                    digest.update(record)
                    length += len(record)
                    yield record

        self._path = None  # until the new one is whole
        write_file(path, chunks())
        sync_folder(root)
        self._path, self._length, self._digest = path, length, digest
        self._bound = 2 * length + SLACK

    def _add_all(self, records: Iterator[bytes]) -> None:
        path, self._path = self._path, None  # after an error the file is not continued
        assert path is not None
        for record in records:
            append_file(path, record, at=self._length, sync=False)
            self._length += len(record)
            self._digest.update(record)
        append_file(path, b"", at=self._length, sync=True)
        self._path = path


def _records(number: int, table: ClientTable, ids: np.ndarray | None) -> Iterator[bytes]:
    """The records of these clients, or of all that have a row."""
    for some, rows in table.rows(table.source.written() if ids is None else ids):
        yield _record(number, some, rows)


def _record(number: int, ids: np.ndarray, rows: Tensor) -> bytes:
    head = np.concatenate([[number, len(ids)], ids]).astype("<i8")
    return head.tobytes() + rows.numpy().tobytes()


def log_files(root: Path) -> set[str]:
    """The names of the files in a folder that are named like ours."""
    return {name for name in os.listdir(root) if re.fullmatch(_NAME, name, re.ASCII)}
