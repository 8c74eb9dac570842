"""Tensors as .npy bytes, written by NumPy and read by a strict parser that checks sizes before it allocates.

Nothing else is parsed: no containers (.npz), no objects, no structured, text or complex types, no foreign byte order.
bfloat16, which NumPy lacks, is sent as its 16 bits (`<u2`) under its own name, so nothing is rounded on the way.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.refusal import Refused
from consilience.core.tree import Tree

LONGEST_HEADER = 4096  # bytes
USUAL_HEADER = 256  # bytes, magic included: NumPy writes 128 for any shape with fewer than ten axes

_MAGIC = b"\x93NUMPY"
_LENGTH = {1: 2, 2: 4}  # bytes of the header's length, by version
_DESCRIPTIONS = {
    torch.float64: "<f8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<u2",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "|i1",
    torch.uint8: "|u1",
    torch.bool: "|b1",
}
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _DESCRIPTIONS}
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_HEADER = re.compile(
    rf"\{{'descr': '([<|][a-z][1-8])', 'fortran_order': (False|True), "
    rf"'shape': \(((?:{_NUMBER}, )+{_NUMBER}|{_NUMBER},|)\), \}} *\n"
)


class Packed(NamedTuple):
    """A tensor as bytes, with its declared dtype and shape."""

    data: bytes
    dtype: str  # such as "float32", "bfloat16"
    shape: tuple[int, ...]


def to_bytes(value: Tensor) -> Packed:
    """A tensor as an .npy file in row-major order, which `from_bytes` reads back bit for bit."""
    if value.dtype not in _DESCRIPTIONS:
        raise ValueError(f"{value.dtype} cannot be sent: only {', '.join(_NAMES)}")
    shape, header = tuple(value.shape), io.BytesIO()
    about = {"descr": _DESCRIPTIONS[value.dtype], "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, about)
    return Packed(b"".join((header.getvalue(), *_content(value))), dtype_name(value.dtype), shape)


def from_bytes(data: Any, shape: Sequence[int], dtype: torch.dtype | str) -> Tensor:
    """The tensor in an .npy file; `Refused`, before memory is allocated, if its shape or dtype is not the expected."""
    wanted, kind = tuple(shape), dtype_of(dtype)
    expected = math.prod(wanted) * kind.itemsize
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise Refused("format", detail=f"{type(data).__name__} is not bytes")
    if len(data) > expected + LONGEST_HEADER + 12:
        raise Refused("size", detail=f"expected {expected:,} bytes and a header, received {len(data):,}")
    description, fortran, declared, start = _header(bytes(data[: LONGEST_HEADER + 12]))
    if description != _DESCRIPTIONS[kind]:
        raise Refused("dtype", detail=f"expected {dtype_name(kind)}, received NumPy's {description}")
    if declared != wanted:
        raise Refused("shape", detail=f"expected {wanted}, received {declared}")
    if len(data) - start != expected:
        raise Refused("size", detail=f"expected {expected:,} bytes after the header, received {len(data) - start:,}")
    value = torch.empty(wanted[::-1] if fortran else wanted, dtype=kind)
    if expected:
        octets = np.frombuffer(data, dtype=np.uint8, offset=start)
        if kind == torch.bool and octets.max() > 1:
            raise Refused("value", detail="a flag is neither 0 nor 1")
        value.reshape(-1).view(torch.uint8).numpy()[:] = octets
    return value.permute(*range(value.dim())[::-1]).contiguous() if fortran else value


def digest(reply: Tree, *facts: str | int) -> str:
    """SHA-256 of a tree's paths, types, shapes and bits, and of `facts`; the order of keys does not matter."""
    flat = tree.flatten(reply)
    head = [[path, dtype_name(flat[path].dtype), list(flat[path].shape)] for path in sorted(flat)]
    found = hashlib.sha256(json.dumps([list(facts), head], separators=(",", ":")).encode("ascii"))
    for path in sorted(flat):
        for part in _content(flat[path]):
            found.update(part)
    return found.hexdigest()


def dtype_of(name: torch.dtype | str) -> torch.dtype:
    """The dtype of this name; `Refused` if it cannot be sent."""
    known = name if isinstance(name, torch.dtype) else _NAMES.get(name) if isinstance(name, str) else None
    if known not in _DESCRIPTIONS:
        raise Refused("dtype", detail=f"{name} is none of {', '.join(_NAMES)}")
    return known


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _content(value: Tensor) -> Iterator[memoryview]:
    if value.numel():
        row_major = value.detach().cpu().resolve_neg().contiguous()
        # one value with an odd stride also counts as contiguous: say (1,), or it cannot be viewed as bytes
        yield row_major.as_strided((row_major.numel(),), (1,)).view(torch.uint8).numpy().data


def _header(front: bytes) -> tuple[str, bool, tuple[int, ...], int]:
    """(dtype, whether Fortran order, shape, offset of the values) as declared in an .npy header."""
    if front[:2] == b"PK":
        raise Refused("format", detail="a zip container (.npz) in place of an .npy array")
    if front[: len(_MAGIC)] != _MAGIC or len(front) < 12:
        raise Refused("format", detail="not an .npy array")
    major, minor = front[6], front[7]
    if major not in _LENGTH or minor:
        raise Refused("format", detail=f"version {major}.{minor} of the .npy format: only 1.0 and 2.0 are read")
    begin = 8 + _LENGTH[major]
    length = int.from_bytes(front[8:begin], "little")
    if length > LONGEST_HEADER or begin + length > len(front):
        raise Refused("format", detail=f"a header of {length:,} bytes")
    text = front[begin : begin + length].decode("latin-1")
    found = _HEADER.fullmatch(text)
    if found is None:
        reason = "dtype" if re.match(r"\{'descr': (?!'[<|][a-z][1-8]')", text) else "format"
        raise Refused(reason, detail=f"a header that is not allowed: {text[:80].strip()}")
    description, fortran, shape = found.groups()
    return description, fortran == "True", tuple(int(n) for n in shape.split(",") if n.strip()), begin + length
