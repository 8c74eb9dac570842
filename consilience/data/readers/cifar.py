"""The two original formats of CIFAR-10 and CIFAR-100: binary records and Python batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from consilience.core.settings import Invalid
from consilience.data.readers.files import read_bytes
from consilience.data.readers.pickled import read_pickled

PICTURE = (3, 32, 32)
PIXELS = 3 * 32 * 32


def read_binary_batch(path: Path, *, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures [N, 3, 32, 32] and labels [N, label_bytes] of a binary batch: labels first, then the pixels."""
    content = np.frombuffer(read_bytes(path), np.uint8)
    record = label_bytes + PIXELS
    if len(content) == 0 or len(content) % record:
        raise Invalid(f"{path} is cut off or of another kind: {len(content)} bytes are not whole records of {record}")
    records = content.reshape(-1, record)
    return records[:, label_bytes:].reshape(-1, *PICTURE), records[:, :label_bytes]


def read_python_batch(path: Path, *, label_names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Pictures [N, 3, 32, 32] and labels [N, len(label_names)] of a Python batch."""
    batch = read_pickled(path)
    pixels = _entry(path, batch, "data")
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != PIXELS:
        raise Invalid(f"{path}: 'data' must be a byte array of rows of {PIXELS} pixels")
    labels = [np.asarray(_entry(path, batch, name)) for name in label_names]
    for name, column in zip(label_names, labels):
        if column.shape != (len(pixels),) or column.dtype.kind not in "iu":
            raise Invalid(f"{path}: {len(pixels)} pictures but {name!r} has {column.size} whole numbers")
    return pixels.reshape(-1, *PICTURE), np.stack(labels, axis=1)


def read_label_names(path: Path, key: str) -> tuple[str, ...]:
    """Class names from a Python `meta` file or a text file of one name a line."""
    if path.suffix == ".txt":
        return tuple(line.strip() for line in path.read_text().splitlines() if line.strip())
    names = _entry(path, read_pickled(path), key)
    if not isinstance(names, list):
        raise Invalid(f"{path}: {key!r} must be a list of names")
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


def _entry(path: Path, batch: object, name: str) -> object:
    # Python 2 wrote the keys as bytes.
    if isinstance(batch, dict):
        for key in (name, name.encode()):
            if key in batch:
                return batch[key]
    raise Invalid(f"{path} has no entry {name!r}: it is not a CIFAR batch")
