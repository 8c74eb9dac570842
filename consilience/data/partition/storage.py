"""Partitions on disk: flat row numbers and offsets in an `.npz`, no pickle, written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from consilience.core.settings import Invalid


def fingerprint(parts: Sequence[np.ndarray]) -> str:
    """SHA-256 of a partition: client count, sizes, row numbers, all as little-endian int64."""
    digest = hashlib.sha256(np.array([len(parts)], dtype="<i8").tobytes())
    digest.update(np.array([len(part) for part in parts], dtype="<i8").tobytes())
    for part in parts:
        digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    return digest.hexdigest()


def save(parts: Sequence[np.ndarray], path: str | os.PathLike[str]) -> None:
    """Write a partition with its fingerprint; a crash leaves the old file or the new one whole."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name + ".", suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(encoded(parts))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(target.parent)


def encoded(parts: Sequence[np.ndarray]) -> bytes:
    """A partition with its fingerprint as the bytes of an `.npz`; equal partitions give equal bytes."""
    rows = np.concatenate([np.asarray(part, dtype="<i8") for part in parts]) if parts else np.empty(0, "<i8")
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype("<i8")
    digest = np.frombuffer(bytes.fromhex(fingerprint(parts)), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, rows=rows, offsets=offsets, sha256=digest)
    return buffer.getvalue()


def load(path: str | os.PathLike[str]) -> list[np.ndarray]:
    """Read what `save` wrote; other or modified files are refused."""
    return decoded(_bytes(path), str(path))


def decoded(data: bytes, path: str) -> list[np.ndarray]:
    """The partition in the bytes that `encoded` made; `path` is what errors call it."""
    arrays = _arrays(data, path)
    if set(arrays) != {"rows", "offsets", "sha256"}:
        raise Invalid(f"{path} is not a saved partition: it holds {', '.join(sorted(arrays)) or 'nothing'}")
    rows, offsets = arrays["rows"], arrays["offsets"]
    whole = all(a.ndim == 1 and np.issubdtype(a.dtype, np.integer) for a in (rows, offsets))
    if not whole or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(rows) or (np.diff(offsets) < 0).any():
        raise Invalid(f"{path} is damaged: its offsets do not describe its {rows.size} rows")
    parts = [part.astype(np.int64) for part in np.split(rows, offsets[1:-1])] if len(offsets) > 1 else []
    if arrays["sha256"].tobytes().hex() != fingerprint(parts):
        raise Invalid(f"{path} is damaged: its rows do not match the fingerprint saved with them")
    return parts


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Every array of an `.npz` file, without pickle; a missing or unreadable file is an error that names it."""
    return _arrays(_bytes(path), str(path))


def _bytes(path: str | os.PathLike[str]) -> bytes:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no partition file at {path}: save one with consilience.data.partition.save")
    try:
        return Path(path).read_bytes()
    except OSError as problem:
        raise Invalid(f"{path} cannot be read: {problem.strerror}") from problem


def _arrays(data: bytes, path: str) -> dict[str, np.ndarray]:
    try:
        archive = np.load(io.BytesIO(data), allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it is one bare array")
        with archive:
            return {name: archive[name] for name in archive.files}
    except (
        ValueError,
        OSError,
        EOFError,
        KeyError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as problem:
        raise Invalid(f"{path} cannot be read as an .npz of arrays: {problem}") from problem


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
