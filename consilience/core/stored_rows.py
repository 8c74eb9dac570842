"""Rows stored in host memory or in files: shape and dtype are known, values are read on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.remote import RemoteTensor

AT_ONCE = 32 << 20  # bytes read at a time when all rows are read


class RowSource(Protocol):
    """Stored rows of one shape and dtype; it can be pickled and read by several threads."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, ...] of all rows."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype."""
        ...

    def read(self, rows: np.ndarray, out: Tensor) -> None:
        """Fill `out`, [m, ...] in host memory, with these rows."""
        ...

    def digest(self) -> str:
        """A digest of all stored data, read in pieces."""
        ...


class PixelScaling(NamedTuple):
    """(value / top - centre) / width for each channel, in float32 and in this order on every device."""

    centre: Tensor  # [C, 1, 1] or one number
    width: Tensor
    top: float = 255.0

    def __call__(self, values: Tensor) -> Tensor:
        """Features [..., C, H, W]."""
        found = values.to(torch.float32).div(self.top)
        return found.sub(self.centre.to(found.device)).div(self.width.to(found.device))


class Preparation(NamedTuple):
    """Converts a batch of stored values to features on the device."""

    scaling: PixelScaling | None
    dtype: torch.dtype  # of floating features

    def __call__(self, values: Tensor) -> Tensor:
        """Floating features in `dtype`, integers as int64."""
        found = values if self.scaling is None else self.scaling(values)
        return found.to(self.dtype if found.is_floating_point() else torch.int64)

    def on(self, device: torch.device | str) -> Preparation:
        """The same conversion with its constants on a device."""
        scaling = self.scaling
        if scaling is not None:
            scaling = scaling._replace(centre=scaling.centre.to(device), width=scaling.width.to(device))
        return self._replace(scaling=scaling)


class StoredRows:
    """A source of stored values as rows of features."""

    place = None
    lengths = None
    lasting = True
    portable = True  # other processes can read them

    def __init__(self, source: RowSource, scaling: PixelScaling | None) -> None:
        self.source = source
        floating = scaling is not None or source.dtype.is_floating_point
        self.preparation = Preparation(scaling, torch.float32)
        self.dtype = torch.float32 if floating else torch.int64

    def fetch(self, rows: np.ndarray) -> Tensor:
        """[n, ...] these rows as features, converted in pieces."""
        found = torch.empty((len(rows), *self.source.shape[1:]), dtype=self.dtype)
        many = max(1, AT_ONCE // max(1, found[:1].numel() * found.element_size()))
        for begin in range(0, len(rows), many):
            found[begin : begin + many] = self.preparation(self.values(rows[begin : begin + many]))
        return found

    def values(self, rows: np.ndarray, *, pinned: bool = False) -> Tensor:
        """[n, ...] these rows as they are stored, in host memory."""
        out = torch.empty((len(rows), *self.source.shape[1:]), dtype=self.source.dtype, pin_memory=pinned)
        self.source.read(rows, out)
        return out

    def print_of(self, rows: np.ndarray | None) -> str:
        """A digest of these rows as features; all stored data are read, in pieces."""
        found = hashlib.sha256(f"{self.source.digest()} {self.source.dtype} {self.source.shape}\n".encode())
        found.update(b"" if rows is None else np.ascontiguousarray(rows, dtype="<i8").tobytes())
        if self.preparation.scaling is not None:
            centre, width, top = self.preparation.scaling
            found.update(f"{centre.flatten().tolist()} {width.flatten().tolist()} {top}".encode())
        return found.hexdigest()


def stored(source: RowSource, scaling: PixelScaling | None = None) -> RemoteTensor:
    """The rows of a source as a tensor of features that reads rows on demand."""
    rows = StoredRows(source, scaling)
    return RemoteTensor.whole(rows, source.shape[0], source.shape[1:], rows.dtype, torch.device("cpu"))


def is_stored(leaf: Any) -> bool:
    """Whether a leaf's rows are in a source."""
    return isinstance(leaf, RemoteTensor) and isinstance(leaf.source, StoredRows)


def stored_values(leaf: Any, index: np.ndarray, *, pinned: bool = False) -> Tensor:
    """[n, ...] the stored values, in host memory, of some rows of a leaf whose rows are in a source."""
    return leaf.source.values(leaf._numbers(index), pinned=pinned)


def has_stored(values: Any) -> bool:
    """Whether any leaf's rows are in a source."""
    return any(is_stored(leaf) for leaf in tree.leaves(values))


def stored_bytes(values: Any) -> int:
    """Stored bytes of one row, over all leaves that are in a source."""
    found = (leaf.source.source for leaf in tree.leaves(values) if is_stored(leaf))  # type: ignore[attr-defined]
    return sum(int(np.prod(one.shape[1:])) * one.dtype.itemsize for one in found)


def concatenated(trees: Sequence[Any]) -> Any:
    """Stacked trees, concatenated; rows in sources are not read."""
    if len(trees) == 1 or not any(has_stored(values) for values in trees):
        return tree.concatenate(trees)
    return tree.map_leaves(lambda *leaves: _joined(leaves) if is_stored(leaves[0]) else torch.cat(leaves), *trees)


def _joined(leaves: Sequence[Tensor]) -> Tensor:
    sources = [leaf.source for leaf in leaves]  # type: ignore[attr-defined]
    numbers = [leaf._numbers() for leaf in leaves]  # type: ignore[attr-defined]
    first = sources[0]
    if all(one is first for one in sources):
        return RemoteTensor(first, np.concatenate(numbers), leaves[0].shape[1:], leaves[0].dtype, leaves[0].device)
    begins = np.cumsum([0, *(one.source.shape[0] for one in sources)])
    rows = np.concatenate([own + begin for own, begin in zip(numbers, begins)])
    whole = stored(JoinedSource([one.source for one in sources]), first.preparation.scaling)
    return whole.take(rows)


class JoinedSource:
    """Several sources concatenated, such as one file per client."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = list(sources)
        self._begins = np.cumsum([0, *(one.shape[0] for one in sources)])
        self.shape, self.dtype = (int(self._begins[-1]), *sources[0].shape[1:]), sources[0].dtype

    def read(self, rows: np.ndarray, out: Tensor) -> None:
        """See `RowSource`."""
        which = np.searchsorted(self._begins, rows, side="right") - 1
        for number in np.unique(which).tolist():
            mine = np.flatnonzero(which == number)
            own = rows[mine] - self._begins[number]
            if len(mine) == len(rows):
                self._sources[number].read(own, out)
                continue
            part = torch.empty((len(mine), *self.shape[1:]), dtype=self.dtype)
            self._sources[number].read(own, part)
            out[torch.from_numpy(mine)] = part

    def digest(self) -> str:
        """See `RowSource`."""
        return hashlib.sha256("\n".join(one.digest() for one in self._sources).encode()).hexdigest()


class HostSource:
    """Rows in host memory."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.cpu()
        self.shape, self.dtype = tuple(values.shape), values.dtype

    def read(self, rows: np.ndarray, out: Tensor) -> None:
        """See `RowSource`."""
        torch.index_select(self._values, 0, torch.from_numpy(np.ascontiguousarray(rows)), out=out)

    def digest(self) -> str:
        """See `RowSource`."""
        return hashlib.sha256(self._values.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
