"""Rows of named tensors stored as bytes in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.remote import RemoteTensor
from consilience.core.tree import Tree
from consilience.stores.client_rows import NOWHERE, ClientRows, Column
from consilience.stores.row_blocks import (
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

ALIGNED = 16  # bytes of the largest element: every tensor of a row starts at a multiple of it


class Field(NamedTuple):
    """The location of a tensor in a row of bytes."""

    begin: int
    end: int
    shape: torch.Size
    dtype: torch.dtype


class RowLayout:
    """Conversion between rows of named tensors and rows of bytes."""

    def __init__(self, initial: Tree) -> None:
        """The layout of rows like this one."""
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
        """[m, bytes] from rows [m, ...]; `TypeError` if their structure differs from the first row's."""
        data = torch.empty((count, self.length), dtype=torch.uint8, device=device)
        for begin, end in self._gaps:  # gaps are written to disk, too
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
        """A new tensor from its bytes [m, count]."""
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
        self.kinds: list[str] = []  # kind of each block
        self._file: RowFile | None = None
        self._free: list[int] = []
        self._first = self.layout.pack(tree.repeat(initial, 1), 1, device)  # [1, bytes]

    def fresh(self) -> BlockStorage:
        """An empty storage of this kind."""
        return BlockStorage(self.initial, self.device, self.place, self._clients)

    def put(self, rows: Tree, count: int) -> np.ndarray:
        """Store [m, ...] rows and return their slots."""
        while len(self._free) < count:
            self._add_block()
        slots = np.array(sorted(self._free[len(self._free) - count :]), dtype=np.int64)
        data = self.layout.pack(rows, count, self.device)
        for block, mine, places in self._by_block(slots):
            block.put(places, data if len(mine) == count else some_rows(data, mine))
        del self._free[len(self._free) - count :]  # last, so that an error above leaves them free
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
        """Free slots, which are reused in ascending order."""
        self._free.extend(slots[slots != NOWHERE][::-1].tolist())

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes used by the blocks of each kind."""
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
        self._free[:0] = range(first + rows - 1, first - 1, -1)  # the lowest slot is used first, after freed ones

    def _by_block(self, slots: np.ndarray) -> Iterator[tuple[Block, np.ndarray, np.ndarray]]:
        """(block, which of the slots are in it, their positions in it)."""
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
    """The `ClientRows` behind a tree stacked [K, ...]; for an ordinary tree, a writable copy."""
    known = ClientRows.of(values)
    if known is not None:
        return known
    first = tree.rows(values, 0)
    device = next(iter(tree.leaves(first))).device
    return ClientRows.dense(values, BlockStorage(first, device, clients=len(next(iter(tree.leaves(values))))))


def placed(values: Tree, device: torch.device) -> Tree:
    """A tree moved to a device; client rows stored elsewhere are copied to a storage of that device."""
    moved: dict[int, ClientRows] = {}

    def move(leaf: Tensor) -> Tensor:
        if not isinstance(leaf, RemoteTensor):
            return leaf.to(device)
        if not isinstance(leaf.source, Column):
            return leaf  # one number per client, which the loop reads
        table = leaf.source.table
        if table.storage.device != device or not isinstance(table.storage, BlockStorage):
            if id(table) not in moved:
                storage = BlockStorage(tree.to(table.initial, device), device, clients=len(table))
                moved[id(table)] = table.copied(storage)
            table = moved[id(table)]
        return tree.flatten(table.tree())[leaf.source.path]

    return tree.map_leaves(move, values)
