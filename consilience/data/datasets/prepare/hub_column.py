"""A column of a Hugging Face data set in Arrow files: rows are read and decoded on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core.settings import Invalid

_AT_ONCE = 1000  # rows hashed at a time


class HubColumn:
    """Pictures or lists of numbers in one column of several concatenated parts."""

    def __init__(self, parts: Sequence[Any], column: str, pixels: Callable[[Any], np.ndarray], where: str) -> None:
        self._parts = [part.select_columns([column]) for part in parts]
        self._column, self._pixels, self._where = column, pixels, where
        self._begins = np.cumsum([0, *(len(part) for part in parts)])
        first = self._values(self._parts[0], [0])
        self.shape, self.dtype = (int(self._begins[-1]), *first.shape[1:]), torch.from_numpy(first).dtype

    def read(self, rows: np.ndarray, out: Tensor) -> None:
        """See `RowSource`."""
        which = np.searchsorted(self._begins, rows, side="right") - 1
        for number in np.unique(which).tolist():
            mine = np.flatnonzero(which == number)
            values = self._values(self._parts[number], (rows[mine] - self._begins[number]).tolist())
            if values.shape[1:] != self.shape[1:]:
                have = f"{values.shape[1:]}, and the first {self.shape[1:]}"
                raise Invalid(f"{self._where}: a row has the shape {have}: give `size` to bring pictures to one")
            out[torch.from_numpy(mine)] = torch.from_numpy(values).to(self.dtype)

    def digest(self) -> str:
        """SHA-256 of the column as Arrow writes it, in pieces."""
        import pyarrow

        found = hashlib.sha256()
        for part in self._parts:
            arrow = part.with_format("arrow")
            for begin in range(0, len(part), _AT_ONCE):
                sink = pyarrow.BufferOutputStream()
                table = arrow[begin : begin + _AT_ONCE].combine_chunks().replace_schema_metadata(None)
                with pyarrow.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table)
                found.update(sink.getvalue())
        return found.hexdigest()

    def _values(self, part: Any, rows: list[int]) -> np.ndarray:
        """[m, ...] of some rows."""
        values = part[rows][self._column]
        if hasattr(values[0], "convert"):  # a PIL image
            values = [self._pixels(value) for value in values]
        shapes = {np.shape(value) for value in values}
        if len(shapes) != 1:
            raise Invalid(f"{self._where}: rows have the shapes {sorted(shapes)[:5]}: give `size`")
        array = np.stack([np.asarray(value) for value in values])
        if array.dtype.kind not in "uif" or array.ndim < 2:
            raise Invalid(f"{self._where}: rows must be pictures or lists of numbers, not {array.dtype} {array.shape}")
        return array
