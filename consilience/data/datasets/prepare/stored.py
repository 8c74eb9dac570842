"""Rows that stay in files: statistics and checks computed piece by piece, and pictures decoded on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core.remote import RemoteTensor
from consilience.core.settings import Invalid
from consilience.core.stored_rows import AT_ONCE, RowSource, stored
from consilience.data.datasets.prepare.assemble import refuse_nonfinite
from consilience.data.datasets.prepare.features import Scaling
from consilience.data.datasets.prepare.pictures import Normalise, channels_first, statistics_of_pieces
from consilience.data.readers.pictures import Fit, read_pictures
from consilience.stores.array_files import pixel_scaling

Keeping = Literal["memory", "file"]
"""memory: all rows are read at the start; file: each is read when it is needed."""


def stored_features(
    source: RowSource, train: np.ndarray, test: np.ndarray, how: Scaling | None, where: Path | str
) -> tuple[RemoteTensor, RemoteTensor]:
    """Features of training and test rows: pictures scaled by statistics of the training rows, numbers as they are."""
    if source.dtype == torch.uint8 and len(source.shape) > 2:
        pictures = PictureRows(source, where)
        scaling: Normalise = "unit" if how == "none" else how or "standard"
        whole = stored(pictures, pixel_scaling(*stored_statistics(pictures, train, scaling)))
        return whole.take(train), whole.take(test)
    if how not in (None, "none"):
        raise Invalid(
            f"{where}: normalise = {how!r} is for pictures where rows stay in a file; these are {source.dtype}: use "
            "'none', or scale the file's numbers beforehand"
        )
    if source.dtype.is_floating_point:
        for begin, piece in enumerate(_pieces(source, np.arange(source.shape[0]))):
            refuse_nonfinite(piece, f"{where}, piece {begin}")
    whole = stored(source)
    return whole.take(train), whole.take(test)


def stored_statistics(source: RowSource, train: np.ndarray, how: Normalise) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each channel of the training rows, with which pixels in [0, 1] are standardised."""
    return statistics_of_pieces(_pieces(source, train), how)


class PictureRows:
    """Pictures of a source with their channels first."""

    def __init__(self, source: RowSource, where: Path | str) -> None:
        self._source = source
        self.shape = (source.shape[0], *channels_first(np.empty((0, *source.shape[1:]), np.uint8), where).shape[1:])
        self.dtype = source.dtype

    def read(self, rows: np.ndarray, out: Tensor) -> None:
        """See `RowSource`."""
        if self.shape == self._source.shape:
            self._source.read(rows, out)
            return
        values = torch.empty((len(rows), *self._source.shape[1:]), dtype=self.dtype)
        self._source.read(rows, values)
        out.copy_(torch.from_numpy(channels_first(values.numpy(), "")))

    def digest(self) -> str:
        """See `RowSource`."""
        return self._source.digest()


class PictureFiles:
    """Encoded pictures, one file each, decoded and resized on demand."""

    dtype = torch.uint8

    def __init__(self, paths: Sequence[Path], *, size: int | None, fit: Fit, grey: bool) -> None:
        self._paths, self._how = list(paths), {"size": size, "fit": fit, "grey": grey}
        first = read_pictures(self._paths[:1], size=size, fit=fit, grey=grey)
        self.shape = (len(self._paths), *first.shape[1:])

    def read(self, rows: np.ndarray, out: Tensor) -> None:
        """See `RowSource`."""
        if not len(rows):
            return
        found = read_pictures([self._paths[row] for row in rows.tolist()], **self._how)  # type: ignore[arg-type]
        if found.shape[1:] != self.shape[1:]:
            have, need = (f"{shape[3]}x{shape[2]}" for shape in (found.shape, self.shape))
            raise Invalid(f"{self._paths[int(rows[0])]} is {have} but {self._paths[0]} is {need}: give `size`")
        out.copy_(torch.from_numpy(found))

    def digest(self) -> str:
        """Digest of all files' bytes and of the way they are resized."""
        found = hashlib.sha256(f"{self._how}\n".encode())
        for path in self._paths:
            with open(path, "rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        return found.hexdigest()


def _pieces(source: RowSource, rows: np.ndarray) -> Iterator[np.ndarray]:
    """The values of these rows, a few megabytes at a time."""
    many = max(1, AT_ONCE // max(1, int(np.prod(source.shape[1:])) * source.dtype.itemsize))
    for begin in range(0, len(rows), many):
        some = rows[begin : begin + many]
        out: Any = torch.empty((len(some), *source.shape[1:]), dtype=source.dtype)
        source.read(some, out)
        yield out.to(torch.float32).numpy() if source.dtype == torch.bfloat16 else out.numpy()
