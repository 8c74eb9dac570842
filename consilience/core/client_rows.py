"""One row of named tensors per client: only clients that were ever met have one, and a change costs what it changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.remote import RemoteTensor
from consilience.core.row_blocks import (
    BLOCK_BYTES,
    Block,
    FileBlock,
    NearBlock,
    PinnedBlock,
    RowFile,
    RowPlace,
    put_rows,
    some_rows,
)
from consilience.core.tree import Tree
from consilience.core.versions import ClientVector, Mark

NOWHERE = -1
ALIGNED = 16  # bytes of the largest element: every tensor of a row starts at a multiple
_AT_ONCE = 128 << 20  # bytes that are copied together from one storage to another


class RowStorage(Protocol):
    """Rows in numbered slots, which are written once and freed."""

    @property
    def initial(self) -> Tree:
        """The row of a client that has none."""
        ...

    @property
    def device(self) -> torch.device:
        """Where rows are read to."""
        ...

    def put(self, rows: Any, count: int) -> np.ndarray:
        """Store [m, ...] rows; their slots."""
        ...

    def get(self, slots: np.ndarray) -> Tree:
        """[m, ...] the rows of these slots; `NOWHERE`: the initial one."""
        ...

    def column(self, slots: np.ndarray, path: str) -> Tensor:
        """[m, ...] one tensor of these rows."""
        ...

    def release(self, slots: np.ndarray) -> None:
        """Free slots; `NOWHERE` is none."""
        ...

    def fresh(self) -> RowStorage:
        """An empty storage of this kind."""
        ...


class ClientRows:
    """A row of every client, as it was at one point; `write` gives the next version, and this one stays as it is.

    A changed row gets a new slot; the old one is freed when no version with it is in use any more. So a round reads and
    writes its cohort's rows, and nothing is copied.
    """

    def __init__(self, storage: RowStorage, clients: int) -> None:
        self.storage = storage
        self._slots = ClientVector.filled(clients, NOWHERE, np.int64)

    @staticmethod
    def of(values: Tree) -> ClientRows | None:
        """The rows behind a tree that `tree` gave; None for another."""
        first = next(iter(tree.leaves(values)), None)
        column = first.source if isinstance(first, RemoteTensor) and first.rows is None else None
        return column.table if isinstance(column, _Column) else None

    @staticmethod
    def at_slots(storage: RowStorage, slots: np.ndarray) -> ClientRows:
        """[K] clients whose rows are in these slots already."""
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
        """The row of a client that was never met."""
        return self.storage.initial

    def read(self, ids: np.ndarray) -> Tree:
        """[m, ...] the rows of some clients, on the device."""
        return self.storage.get(self._slots[ids])

    def column(self, ids: np.ndarray, path: str) -> Tensor:
        """[m, ...] one tensor of the rows of some clients."""
        return self.storage.column(self._slots[ids], path)

    def slots(self, ids: np.ndarray) -> np.ndarray:
        """[m] where the rows of some clients are."""
        return self._slots[ids]

    def write(self, ids: np.ndarray, rows: Any) -> ClientRows:
        """The next version, in which these clients, none twice, have other rows, [m, ...]."""
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
        """For `changed_since` of a later version."""
        return self._slots.mark

    def changed_since(self, mark: Mark | None) -> np.ndarray | None:
        """Ascending ids of the clients whose rows may have changed; None where that is not known."""
        return self._slots.changed_since(mark)

    def tree(self) -> Tree:
        """Stacked [K, ...]; rows are read when something asks for them."""
        flat = {  # made anew each time: a reference from here would keep old versions until cycles are collected
            path: RemoteTensor.whole(_Column(self, path), len(self), one.shape, one.dtype, self.storage.device)
            for path, one in tree.flatten(self.initial).items()
        }
        return tree.shaped_like(self.initial, flat)


class _Column:
    """One tensor of all clients' rows."""

    place = None
    lengths = None
    lasting = True

    def __init__(self, table: ClientRows, path: str) -> None:
        self.table, self.path = table, path

    def fetch(self, rows: np.ndarray) -> Tensor:
        """[n, ...] these clients'."""
        return self.table.column(rows, self.path)


class Field(NamedTuple):
    """Where a tensor lies in a row of bytes."""

    begin: int
    end: int
    shape: torch.Size
    dtype: torch.dtype


class RowLayout:
    """Rows of named tensors as rows of bytes, and back."""

    def __init__(self, initial: Tree) -> None:
        """Of rows like this one."""
        self._like, self.fields, end = initial, dict[str, Field](), 0
        for path, leaf in tree.flatten(initial).items():
            begin = -(-end // ALIGNED) * ALIGNED
            end = begin + leaf.numel() * leaf.element_size()
            self.fields[path] = Field(begin, end, leaf.shape, leaf.dtype)
        self.length = max(1, -(-end // ALIGNED)) * ALIGNED
        ends = [0, *(field.end for field in self.fields.values())]
        begins = [*(field.begin for field in self.fields.values()), self.length]
        self._gaps = [(end, begin) for end, begin in zip(ends, begins) if begin > end]

    def pack(self, rows: Tree, count: int, device: torch.device) -> Tensor:
        """[m, bytes] from rows [m, ...]; `TypeError` if they are not like the first."""
        data = torch.empty((count, self.length), dtype=torch.uint8, device=device)
        for begin, end in self._gaps:  # they reach the disk
            data[:, begin:end] = 0
        flat = tree.flatten(rows)
        if flat.keys() != self.fields.keys():
            raise TypeError(f"a row holds {sorted(flat)}, and those before it {sorted(self.fields)}")
        for path, field in self.fields.items():
            if flat[path].shape[1:] != field.shape or flat[path].dtype != field.dtype:
                raise TypeError(f"{path} is {flat[path].dtype} {tuple(flat[path].shape[1:])}, and was {field[2:]}")
            if field.end > field.begin:
                part = data[:, field.begin : field.end].view(field.dtype)
                part.copy_(flat[path].reshape(part.shape))
        return data

    def unpack(self, data: Tensor) -> Tree:
        """[m, ...] from [m, bytes]."""
        flat = {path: self.tensor(data[:, f.begin : f.end], f) for path, f in self.fields.items()}
        return tree.shaped_like(self._like, flat)

    def tensor(self, data: Tensor, field: Field) -> Tensor:
        """A tensor of its own from its bytes [m, count]."""
        shape = (len(data), *field.shape)
        if not math.prod(field.shape):
            return torch.empty(shape, dtype=field.dtype, device=data.device)
        return data.view(field.dtype).reshape(shape).contiguous()


class BlockStorage:
    """Rows as bytes in blocks of equal size, each on the device, in host memory or in a file."""

    def __init__(self, initial: Tree, device: torch.device, place: RowPlace | None = None, clients: int = 1) -> None:
        self.initial, self.device, self.place = initial, device, place or RowPlace()
        self._clients = clients
        self.layout = RowLayout(initial)
        self.length = self.layout.length
        self._rows_per_block = max(1, min(BLOCK_BYTES // self.length, 2 * max(8, clients)))
        self._kinds = self.place.kinds(device, self._rows_per_block * self.length)
        self._blocks: list[Block] = []
        self.kinds: list[str] = []  # of the blocks
        self._file: RowFile | None = None
        self._free: list[int] = []
        self._first = self.layout.pack(tree.repeat(initial, 1), 1, device)  # [1, bytes]

    def fresh(self) -> BlockStorage:
        """An empty storage of this kind."""
        return BlockStorage(self.initial, self.device, self.place, self._clients)

    def put(self, rows: Tree, count: int) -> np.ndarray:
        """Store [m, ...] rows; their slots."""
        while len(self._free) < count:
            self._add_block()
        slots = np.array(sorted(self._free[len(self._free) - count :]), dtype=np.int64)
        data = self.layout.pack(rows, count, self.device)
        for block, mine, places in self._by_block(slots):
            block.put(places, data if len(mine) == count else some_rows(data, mine))
        del self._free[len(self._free) - count :]  # only now: an error above leaves them free
        return slots

    def get(self, slots: np.ndarray) -> Tree:
        """[m, ...] the rows of these slots."""
        return self.layout.unpack(self.bytes(slots))

    def bytes(self, slots: np.ndarray) -> Tensor:
        """[m, bytes] the rows of these slots as bytes, on the device."""
        return self._bytes(slots, 0, self.length)

    def column(self, slots: np.ndarray, path: str) -> Tensor:
        """[m, ...] one tensor of these rows."""
        field = self.layout.fields[path]
        if field.end == field.begin:
            return torch.empty((len(slots), *field.shape), dtype=field.dtype, device=self.device)
        return self.layout.tensor(self._bytes(slots, field.begin, field.end - field.begin), field)

    def release(self, slots: np.ndarray) -> None:
        """Free slots, to be taken again in ascending order."""
        self._free.extend(slots[slots != NOWHERE][::-1].tolist())

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes that the blocks of each kind take."""
        size = self._rows_per_block * self.length
        return {kind: self.kinds.count(kind) * size for kind in dict.fromkeys(self.kinds)}

    def _add_block(self) -> None:
        kind, first = next(self._kinds), len(self._blocks) * self._rows_per_block
        rows = self._rows_per_block
        block: Block | None = None
        if kind == "device" or (kind == "host" and self.device.type == "cpu"):
            try:
                block = NearBlock(rows, self.length, self.device)
            except torch.OutOfMemoryError:
                if self.place.kind != "auto":
                    raise
                kind = "host"
        if block is None and kind == "host":
            block = PinnedBlock(rows, self.length)
        elif block is None:
            self._file = self._file or RowFile(self.place.folder)
            block = FileBlock(self._file, rows, self.length)
        self._blocks.append(block)
        self.kinds.append(kind)
        self._free[:0] = range(first + rows - 1, first - 1, -1)  # the lowest slot is taken first, after freed ones

    def _by_block(self, slots: np.ndarray) -> Iterator[tuple[Block, np.ndarray, np.ndarray]]:
        """(block, which of the slots, their places in it)."""
        numbers = slots // self._rows_per_block
        for number in np.unique(numbers).tolist():
            if number >= 0:
                mine = np.flatnonzero(numbers == number)
                yield self._blocks[number], mine, slots[mine] - number * self._rows_per_block

    def _bytes(self, slots: np.ndarray, first: int, count: int) -> Tensor:
        """[m, count] these bytes of the rows, on the device."""
        out = torch.empty((len(slots), count), dtype=torch.uint8, device=self.device)
        unmet = np.flatnonzero(slots == NOWHERE)
        if len(unmet):
            put_rows(out, unmet, self._first[:, first : first + count].expand(len(unmet), -1))
        for block, mine, places in self._by_block(slots):
            if len(mine) == len(slots):
                block.get(places, first, count, out)
            else:
                part = out.new_empty((len(mine), count))
                block.get(places, first, count, part)
                put_rows(out, mine, part)
        return out


def table_of(values: Tree) -> ClientRows:
    """The rows behind a tree stacked [K, ...]; of an ordinary one, a copy that can be written to."""
    known = ClientRows.of(values)
    if known is not None:
        return known
    first = tree.rows(values, 0)
    device = next(iter(tree.leaves(first))).device
    return ClientRows.dense(values, BlockStorage(first, device, clients=len(next(iter(tree.leaves(values))))))


def placed(values: Tree, device: torch.device) -> Tree:
    """A tree on a device; rows of clients that lie elsewhere are copied to a storage of that device."""
    moved: dict[int, ClientRows] = {}

    def move(leaf: Tensor) -> Tensor:
        if not isinstance(leaf, RemoteTensor):
            return leaf.to(device)
        if not isinstance(leaf.source, _Column):
            return leaf  # one number per client, which the loop reads
        table = leaf.source.table
        if table.storage.device != device or not isinstance(table.storage, BlockStorage):
            if id(table) not in moved:
                storage = BlockStorage(tree.to(table.initial, device), device, clients=len(table))
                moved[id(table)] = table.copied(storage)
            table = moved[id(table)]
        return tree.flatten(table.tree())[leaf.source.path]

    return tree.map_leaves(move, values)


def _pieces(ids: np.ndarray, length: int) -> Iterator[np.ndarray]:
    many = max(1, _AT_ONCE // max(length, 1))
    for begin in range(0, len(ids), many):
        yield ids[begin : begin + many]
