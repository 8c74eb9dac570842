"""NumPy .npz archives, without the object arrays that could run code."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from consilience.core.settings import Invalid
from consilience.data.readers.files import refuse_unpacked

DAMAGE = (
    *(ValueError, EOFError, OSError, KeyError, TypeError, OverflowError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, SyntaxError, tokenize.TokenError),
)
"""What zipfile and NumPy raise for damaged archives, and for those of other versions or with a password."""


def read_npz(path: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """The named arrays of an archive (all of them by default); object arrays are refused."""
    present = npz_names(path)
    absent = [name for name in names or () if name not in present]
    if absent:
        raise Invalid(f"{path} has no array {', '.join(absent)}: it has {', '.join(present) or 'none'}")
    try:
        opened = np.load(path, allow_pickle=False)
    except DAMAGE as problem:
        raise Invalid(f"{path} is not a readable .npz archive: {problem}") from problem
    with opened as archive:
        return {name: _read_array(path, archive, name) for name in names or present}


def npz_names(path: Path) -> tuple[str, ...]:
    """The names of the arrays in an archive, without reading them."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except DAMAGE as problem:
        raise Invalid(f"{path} is not a readable .npz archive: {problem}") from problem
    refuse_unpacked(path, sum(member.file_size for member in members))
    return tuple(member.filename.removesuffix(".npy") for member in members)


def _read_array(path: Path, archive: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    try:
        array = archive[name]
    except DAMAGE as problem:
        if "allow_pickle" in str(problem):
            raise Invalid(
                f"{path}: array {name!r} holds Python objects, which could run code when read: "
                "save it as numbers or text"
            ) from problem
        raise Invalid(f"{path}: array {name!r} cannot be read ({problem}): the file is damaged or cut off") from problem
    if not isinstance(array, np.ndarray):
        raise Invalid(f"{path}: {name!r} is not an array")
    return array
