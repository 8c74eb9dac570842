"""Arrays in .npy and .safetensors files, of which only the requested rows are read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core.remote import RemoteTensor
from consilience.core.settings import Invalid
from consilience.core.stored_rows import AT_ONCE, PixelScaling, stored

_NUMPY = {
    np.dtype(kind): getattr(torch, kind)
    for kind in ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}
_SAFETENSORS = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_MOST_HEADER = 100 << 20


class ArrayFile:
    """One array [N, ...] in a file, located by the file's header.

    Rows are read by offset, not memory-mapped: a mapping counts as the process's address space, and a failing disk
    would kill the process instead of raising an error.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self.name = Path(path).absolute(), name
        self._lock, self._digest = threading.Lock(), ""
        self._file: Any = None  # opened at the first read
        try:
            with open(self.path, "rb") as file:
                found = _safetensors_place(file, self.path, name) if _is_safetensors(path) else _npy_place(file, path)
                self._size = os.fstat(file.fileno()).st_size
        except OSError as problem:
            raise FileNotFoundError(f"{self.path} cannot be read: {problem.strerror}") from problem
        self.dtype, self.shape, self._begin = found
        if len(self.shape) < 1 or not all(self.shape[1:]):
            raise Invalid(f"{self.path} holds an array of shape {self.shape}, which has no rows")
        self._row = math.prod(self.shape[1:]) * self.dtype.itemsize
        if self._size < self._begin + self.shape[0] * self._row:
            raise Invalid(f"{self.path} is shorter than its head says: fetch it again")

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_lock", "_file")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock(), _file=None)

    def read(self, rows: np.ndarray, out: Tensor) -> None:
        """Fill `out`, [m, ...] in host memory, with these rows; consecutive rows are read together."""
        data = out.reshape(-1).view(torch.uint8).numpy().data
        edges = np.flatnonzero(np.diff(rows, prepend=rows[:1] - 2) != 1)
        for begin, end in zip(edges.tolist(), [*edges[1:].tolist(), len(rows)]):
            row = int(rows[begin])
            if not 0 <= row <= self.shape[0] - (end - begin):
                raise IndexError(f"{self.path} has {self.shape[0]} rows, none with number {row}")
            self._fill(self._begin + row * self._row, data[begin * self._row : end * self._row])

    def digest(self) -> str:
        """SHA-256 of the array's bytes, computed once."""
        if not self._digest:
            found, left, at = hashlib.sha256(), self.shape[0] * self._row, self._begin
            buffer = memoryview(bytearray(min(AT_ONCE, max(left, 1))))
            while left:
                part = buffer[: min(left, len(buffer))]
                self._fill(at, part)
                found.update(part)
                at, left = at + len(part), left - len(part)
            self._digest = found.hexdigest()
        return self._digest

    def _fill(self, at: int, view: memoryview) -> None:
        with self._lock:
            if self._file is None:
                self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
        done = 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], at + done)
            if not count:
                raise OSError(f"{self.path} is shorter than it was when the run began: put it back")
            done += count


def open_rows(
    path: Path | str,
    tensor: str | None = None,
    *,
    mean: Any = None,
    deviation: Any = None,
) -> RemoteTensor:
    """The rows [N, ...] of a .npy or .safetensors file as features that stay in the file until they are needed.

        clients = {"a": (cs.open_rows("a.npy"), labels_of_a), "b": (cs.open_rows("b.safetensors", "x"), labels_of_b)}
        federation = cs.Federation.from_clients(clients)

    tensor: the tensor's name in a .safetensors file. uint8 arrays are images [N, C, H, W], converted per batch:
    features are (byte / 255 - mean) / deviation for each channel, or byte / 255 without mean and deviation. Other
    floating types become float32, other integers int64.
    """
    source = ArrayFile(Path(path), tensor)
    is_picture = source.dtype == torch.uint8 and len(source.shape) == 4
    if (mean is not None or deviation is not None) and not is_picture:
        raise Invalid(
            f"{path} holds {source.dtype} {source.shape[1:]}: mean and deviation are for pictures, bytes [N, C, H, W]"
        )
    return stored(source, pixel_scaling(mean, deviation) if is_picture else None)


def pixel_scaling(mean: Any = None, deviation: Any = None) -> PixelScaling:
    """The scaling of bytes by the mean and deviation of each channel in [0, 1] (None: 0 and 1)."""

    def channels(given: Any, usual: float) -> Tensor:
        return torch.as_tensor(np.array(usual if given is None else given), dtype=torch.float32).reshape(-1, 1, 1)

    return PixelScaling(channels(mean, 0.0), channels(deviation, 1.0))


def _is_safetensors(path: Path | str) -> bool:
    return Path(path).suffix == ".safetensors"


def _npy_place(file: Any, path: Path) -> tuple[torch.dtype, tuple[int, ...], int]:
    """(dtype, shape, offset in bytes) of the array in a .npy file."""
    try:
        version = np.lib.format.read_magic(file)
        heads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in heads:
            raise ValueError(f"its version is {version}")
        shape, by_column, kind = heads[version](file)
        if not all(type(one) is int and one >= 0 for one in shape):
            raise ValueError(f"its shape is {shape}")
    except Exception as problem:  # NumPy reads the head as Python text, whose parsers raise many kinds
        raise Invalid(f"{path} is not a .npy file that can be read ({problem}): save it with numpy.save") from problem
    if by_column and len(shape) > 1:
        raise Invalid(f"{path} is stored column by column: save numpy.ascontiguousarray(x)")
    if kind not in _NUMPY:
        raise Invalid(f"{path} holds {kind}: rows must be {', '.join(str(one) for one in _NUMPY)}")
    return _NUMPY[kind], tuple(shape), file.tell()


def _safetensors_place(file: Any, path: Path, name: str | None) -> tuple[torch.dtype, tuple[int, ...], int]:
    """(dtype, shape, offset in bytes) of a tensor in a .safetensors file."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= _MOST_HEADER:
        raise Invalid(f"{path} is not a .safetensors file: save it with safetensors.torch.save_file")
    try:
        head = {key: value for key, value in json.loads(file.read(length)).items() if key != "__metadata__"}
        if name is None and len(head) == 1:
            name = next(iter(head))
        if name not in head:
            held = f"{path} has {', '.join(sorted(head)) or 'no tensors'}"
            raise Invalid(f"{held}: " + ("name one of them" if name is None else f"there is no tensor {name!r} in it"))
        entry = head[name]
        begin, end = entry["data_offsets"]
        kind, shape = _SAFETENSORS.get(entry["dtype"]), tuple(entry["shape"])
        if kind is None:
            raise Invalid(f"{path}, {name}: {entry['dtype']} is not supported: rows must be {', '.join(_SAFETENSORS)}")
        if not all(type(one) is int and one >= 0 for one in (begin, end, *shape)):
            raise ValueError("a shape or place that is no whole number")
        if end - begin != math.prod(shape) * kind.itemsize:
            raise ValueError("a tensor's place does not fit its shape")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        if isinstance(problem, Invalid):
            raise
        raise Invalid(f"{path} is not a .safetensors file ({problem}): fetch it again") from problem
    return kind, shape, 8 + length + begin
