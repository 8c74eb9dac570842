"""Reads new rows of a log that is still being written: a bounded number of bytes at a time, none twice."""

from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilience.runs.disk import open_file

_NUMBERS = re.compile(rb"\[[-+0-9eE.,]{64,}\]")
_LONGEST_LINE = 1 << 26
_TAIL = 160  # bytes: a chained row ends with its digest, so no two prefixes of a log end alike


@dataclass
class Budget:
    """Bytes and seconds that a request may still spend on reading; the rest is read by the next request."""

    left: int
    seconds: float = math.inf

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.seconds

    @property
    def is_spent(self) -> bool:
        return self.left <= 0 or time.monotonic() > self._until


class GrowingLog:
    """Rows of a JSON-lines file since the last read.

    with_lists: long lists of numbers are read too; without them a row of 1,000 clients takes a sixth of the time.
    Digests are not checked here, as that means reading from the first byte: the report does.
    """

    def __init__(self, path: Path, *, with_lists: bool = False) -> None:
        self._path, self._with_lists = path, with_lists
        self._offset, self._tail = 0, b""
        self.behind = 1  # known bytes that are not read yet
        self.problem = ""
        self._stamp: tuple[int, int, int] | None = None  # of the file, when it was read to its end

    def read(self, budget: Budget) -> tuple[bool, list[dict[str, Any]]]:
        """(whether the file was truncated, so that rows start from its beginning again; new rows)."""
        if self._stamp is not None and self._is_as_before():
            return False, []
        try:
            with os.fdopen(open_file(self._path, os.O_RDONLY), "rb") as stream:
                found = os.fstat(stream.fileno())
                size, stamp = found.st_size, _stamp(found)
                anew = not self._continues(stream, size)
                if anew:
                    self._offset, self._tail, self.problem = 0, b"", ""
                if self.problem:
                    self.behind = 0
                    return anew, []
                rows = self._rows(stream, size, budget)
                self._stamp = stamp if self._offset == size else None
                return anew, rows
        except FileNotFoundError:
            self.behind = 0
            return bool(self._offset), []
        except OSError as problem:
            self.behind = 0
            self.problem = f"{self._path.name} cannot be read: {problem.strerror or problem}"
            return False, []

    def _is_as_before(self) -> bool:
        try:
            return _stamp(os.lstat(self._path)) == self._stamp
        except OSError:
            return False

    def _continues(self, stream: Any, size: int) -> bool:
        """Whether the bytes read before are unchanged: a resumed run is truncated to its checkpoint."""
        if size < self._offset:
            return False
        stream.seek(self._offset - len(self._tail))
        return bool(stream.read(len(self._tail)) == self._tail)

    def _rows(self, stream: Any, size: int, budget: Budget) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        stream.seek(self._offset)
        chunk = stream.read(min(size - self._offset, max(budget.left, 0)))
        if b"\n" not in chunk and 0 < len(chunk) < size - self._offset:  # one line beyond the budget
            chunk += stream.readline(_LONGEST_LINE)
        whole = chunk[: chunk.rfind(b"\n") + 1]
        budget.left -= len(chunk)
        for line in whole.splitlines():
            try:
                row = json.loads(line if self._with_lists else _NUMBERS.sub(b"[]", line))
                if not isinstance(row, dict) or type(row.get("round")) is not int:
                    raise ValueError("no row of a round")
            except (ValueError, RecursionError):
                self.problem = f"{self._path.name} is damaged after round {rows[-1]['round'] if rows else '?'}"
                break
            rows.append(row)
        if whole:
            self._tail = whole[-_TAIL:]
        self._offset += len(whole)
        self.behind = size - self._offset if whole or not chunk else 0  # an incomplete line does not count as unread
        return rows


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_mtime_ns, found.st_size, found.st_ino
