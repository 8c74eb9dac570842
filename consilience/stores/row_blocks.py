"""Blocks of rows of equal length, on the device, in host memory or in a file, allocated on demand."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from consilience.core.settings import Invalid

Kind = Literal["device", "host", "file"]
BLOCK_BYTES = 64 << 20
SHARE = 4  # by default, rows take at most 1/4 of the device's memory, then 1/4 of the host's
MOST_RUNS = 256


class RowPlace(NamedTuple):
    """Where rows are kept: "auto" fills the device up to a quarter of its memory, then the host's, then a file."""

    kind: Literal["auto", "device", "host", "file"] = "auto"
    folder: Path | None = None  # of the file; None: the system's temporary folder

    def kinds(self, device: torch.device, length: int) -> Iterator[Kind]:
        """The kind of each further block of `length` bytes."""
        used = 0
        if self.kind == "auto":
            if device.type == "cuda":
                while used + length <= torch.cuda.get_device_properties(device).total_memory // SHARE:
                    used += length
                    yield "device"
                used = 0
            while used + length <= host_memory() // SHARE:
                used += length
                yield "host"
        while True:
            yield "file" if self.kind == "auto" else self.kind


class Block(Protocol):
    """Rows [n, bytes] in one kind of memory."""

    def get(self, places: np.ndarray, first: int, count: int, out: Tensor) -> None:
        """Copy bytes first : first + count of these rows to `out`, [m, count] on the device."""
        ...

    def put(self, places: np.ndarray, rows: Tensor) -> None:
        """Copy `rows`, [m, bytes] on the device, to these positions."""
        ...


class NearBlock:
    """Rows in the memory of the device that reads them."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self._rows = torch.empty((rows, length), dtype=torch.uint8, device=device)

    def get(self, places: np.ndarray, first: int, count: int, out: Tensor) -> None:
        """See `Block`."""
        torch.index_select(_wide(self._rows[:, first : first + count]), 0, _index(places, out), out=_wide(out))

    def put(self, places: np.ndarray, rows: Tensor) -> None:
        """See `Block`."""
        put_rows(self._rows, places, rows)


class PinnedBlock:
    """Rows in page-locked host memory, which a GPU copies without the CPU."""

    def __init__(self, rows: int, length: int) -> None:
        self._rows = torch.empty((rows, length), dtype=torch.uint8, pin_memory=True)

    def get(self, places: np.ndarray, first: int, count: int, out: Tensor) -> None:
        """See `Block`."""
        if count < self._rows.shape[1]:
            torch.cuda.synchronize(out.device)  # the CPU gathers parts of rows, after pending GPU work
        for at, place, many in _runs(places):
            out[at : at + many].copy_(self._rows[place : place + many, first : first + count], non_blocking=True)

    def put(self, places: np.ndarray, rows: Tensor) -> None:
        """See `Block`."""
        for at, place, many in _runs(places):
            self._rows[place : place + many].copy_(rows[at : at + many], non_blocking=True)


class FileBlock:
    """Rows in an unnamed temporary file, which is deleted with the process.

    They are read and written by offset, not memory-mapped: a mapping would count as the process's memory, and a full
    disk would kill the process instead of raising an error.
    """

    def __init__(self, file: RowFile, rows: int, length: int) -> None:
        self._file, self._begin, self._length = file, file.extend(rows * length), length

    def get(self, places: np.ndarray, first: int, count: int, out: Tensor) -> None:
        """See `Block`."""
        read = torch.empty((len(places), count), dtype=torch.uint8)
        whole = first == 0 and count == self._length
        for at, place, many in _runs(places) if whole else ((at, p, 1) for at, p in enumerate(places.tolist())):
            self._file.read(self._begin + place * self._length + first, read[at : at + many].numpy())
        out.copy_(read)

    def put(self, places: np.ndarray, rows: Tensor) -> None:
        """See `Block`."""
        near = rows.cpu()
        for at, place, many in _runs(places):
            self._file.write(self._begin + place * self._length, near[at : at + many].numpy())


class RowFile:
    """A temporary file that grows by whole blocks."""

    def __init__(self, folder: Path | None) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="consilience-rows-")  # noqa: SIM115
        except OSError as problem:
            raise Invalid(f"no file for clients' memories can be made in {folder}: {problem.strerror}") from problem
        self._end = 0

    def extend(self, length: int) -> int:
        """The offset of `length` additional bytes."""
        begin, self._end = self._end, self._end + length
        return begin

    def read(self, at: int, into: np.ndarray) -> None:
        """Fill an array of bytes."""
        view, done = memoryview(into.data).cast("B"), 0
        while done < len(view):
            found = os.preadv(self._file.fileno(), [view[done:]], at + done)
            if not found:
                raise OSError("the file of clients' memories is shorter than it was")
            done += found

    def write(self, at: int, data: np.ndarray) -> None:
        """Store all bytes, or raise the system's error."""
        view, done = memoryview(np.ascontiguousarray(data).data).cast("B"), 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], at + done)


def host_memory() -> int:
    """Bytes of memory that this process can use."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        total = 8 << 30
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return min(total, limit) if limit != resource.RLIM_INFINITY else total
    except ImportError:  # Windows
        return total


def some_rows(rows: Tensor, places: np.ndarray) -> Tensor:
    """Rows of bytes at these positions."""
    return _wide(rows).index_select(0, _index(places, rows)).view(torch.uint8)


def put_rows(into: Tensor, places: np.ndarray, rows: Tensor) -> None:
    """Copy rows of bytes to these positions."""
    runs = list(_runs(places))
    if len(runs) > MOST_RUNS:
        _wide(into).index_copy_(0, _index(places, into), _wide(rows))
        return
    for at, place, many in runs:  # contiguous runs: a deterministic indexed copy is slow on a GPU
        into[place : place + many].copy_(rows[at : at + many])


def _index(places: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(places).to(like.device, non_blocking=True)


def _runs(places: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(position in the list, position in the block, length) of each contiguous run."""
    edges = np.flatnonzero(np.diff(places, prepend=places[:1] - 2) != 1)
    for begin, end in zip(edges.tolist(), [*edges[1:].tolist(), len(places)]):
        yield begin, int(places[begin]), end - begin


def _wide(rows: Tensor) -> Tensor:
    """The same bytes viewed as larger words if their number allows it, which kernels copy several times faster.

    Rows of a block and their tensors start at multiples of the largest word.
    """
    for dtype in (torch.int64, torch.int32, torch.int16):
        if rows.shape[1] % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows
