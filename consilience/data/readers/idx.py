"""IDX: the format of MNIST and its family (a magic number, big-endian sizes, then the values)."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from consilience.core.settings import Invalid
from consilience.data.readers.files import read_bytes

VALUE_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path, *, dimensions: int) -> np.ndarray:
    """The array of an IDX file that must have so many dimensions (1: labels, 3: pictures)."""
    content = read_bytes(path)
    expected = f"an IDX file of {dimensions} dimensions starts with 0 0 8 {dimensions}"
    if len(content) < 4:
        raise Invalid(f"{path} is cut off: it has {len(content)} bytes and {expected}")
    zeros, code, rank = struct.unpack(">HBB", content[:4])
    if zeros != 0 or code not in VALUE_TYPES or rank != dimensions:
        found = " ".join(str(byte) for byte in content[:4])
        raise Invalid(f"{path} has the wrong magic number {found}: {expected}")
    start = 4 + 4 * rank
    if len(content) < start:
        raise Invalid(f"{path} is cut off inside its header: {len(content)} of {start} bytes")
    shape = struct.unpack(f">{rank}I", content[4:start])
    dtype = np.dtype(VALUE_TYPES[code])
    size = math.prod(shape) * dtype.itemsize
    if len(content) - start != size:
        defect = "cut off" if len(content) - start < size else "too long"
        raise Invalid(f"{path} is {defect}: its header announces {shape} = {size} bytes, {len(content) - start} follow")
    return np.frombuffer(content, dtype, offset=start).reshape(shape)
