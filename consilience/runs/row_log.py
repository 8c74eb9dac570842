"""An append-only file of JSON rows: each row is written atomically, and the bytes so far have a digest.

A row of a chained log ends with `chain`, the SHA-256 of the chain before it and of the row itself: a row that is
changed, removed, added or moved breaks it. Only rows missing at the end do not; the folder detects those by count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilience.core.settings import Invalid
from consilience.runs import canonical
from consilience.runs.disk import append_file, cut_file, explain, read_file, replace_file, sync_file
from consilience.runs.names import plain

CHAIN = "chain"


class RecordError(RuntimeError):
    """A file of the run folder could not be written or is damaged; the message names it and the reason."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The rows of a log; `note` mentions an incomplete last line that was left out."""

    rows: list[dict[str, Any]]
    note: str = ""
    chains: tuple[str, ...] = ()  # of a chained log: the chain after each row


class RowLog:
    """Appends rows as canonical JSON; NaN and infinite numbers become null, since JSON has none."""

    def __init__(self, path: Path, *, chained: bool = False) -> None:
        self.path, self.chained = Path(path), chained
        self._length = -1  # bytes in the file; -1: not read yet
        self._digest = hashlib.sha256()
        self._chain = ""

    def append(self, row: Mapping[str, Any], *, sync: bool = True) -> tuple[int, str]:
        """Add one row, durably unless `sync` is off; the file's byte length and SHA-256 so far."""
        stored = canonical.to_json_types(row, "row", nonfinite_as_null=True)
        if self._length < 0:
            self._catch_up()
        chain = _link(self._chain, stored) if self.chained else ""
        line = canonical.encode(stored | ({CHAIN: chain} if self.chained else {})) + b"\n"
        try:
            append_file(self.path, line, at=self._length, sync=sync)
        except OSError as problem:
            raise RecordError(explain("add a row to", self.path, problem)) from problem
        self._length, self._chain = self._length + len(line), chain
        self._digest.update(line)
        return self._length, self._digest.hexdigest()

    def sync(self) -> None:
        """Make the rows that were added without `sync` durable."""
        try:
            sync_file(self.path)
        except OSError as problem:
            raise RecordError(explain("flush", self.path, problem)) from problem

    def position(self) -> tuple[int, str]:
        """The file's byte length and SHA-256 now: what `truncate` needs to come back to this point."""
        if self._length < 0:
            self._catch_up()
        return self._length, self._digest.hexdigest()

    @property
    def chain(self) -> str:
        """The chain after the last row of a chained log; "" before the first."""
        if self._length < 0:
            self._catch_up()
        return self._chain

    def truncate(self, length: int, sha256: str) -> None:
        """Remove the rows after byte `length`, after checking that those before it are unchanged."""
        kept = self._bytes()[:length] if length >= 0 else b""
        if len(kept) != length:
            raise RecordError(f"{self.path} holds {len(kept)} bytes where the checkpoint counted on {length}")
        if hashlib.sha256(kept).hexdigest() != sha256:
            raise RecordError(f"{self.path} was changed: its first {length} bytes are not those written")
        try:
            cut_file(self.path, length)
        except OSError as problem:
            raise RecordError(explain("cut back", self.path, problem)) from problem
        self._length, self._digest, self._chain = length, hashlib.sha256(kept), self._last_chain(kept)

    def drop_torn_line(self) -> None:
        """Remove the half-written last line a crash may have left."""
        data = self._bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self.truncate(whole, hashlib.sha256(data[:whole]).hexdigest())

    def keep_rounds(self, last: int) -> None:
        """Cut off the rows of rounds after `last`, and whatever follows a damaged row."""
        if not self.path.exists():
            self._create()
        data, kept = self._bytes(), 0
        for line in data.splitlines(keepends=True):
            try:
                row = canonical.decode(line)
                whole = line.endswith(b"\n") and isinstance(row, dict) and 0 < row["round"] <= last
            except (ValueError, KeyError, TypeError):
                break
            if not whole:
                break
            kept += len(line)
        if kept < len(data):
            self.truncate(kept, hashlib.sha256(data[:kept]).hexdigest())

    def read(self) -> History:
        """Every row; a torn last line is left out and noted, other damage is a `RecordError` with line."""
        *lines, rest = self._bytes().split(b"\n")
        rows, chains, chain = [], [], ""
        for number, line in enumerate(lines, 1):
            try:
                row = canonical.decode(line)
                if not isinstance(row, dict):
                    raise Invalid(f"a row is a JSON object, not {type(row).__name__}")
                if self.chained:
                    chain = _checked(row, chain, line)
            except ValueError as problem:
                raise RecordError(f"{self.path}, line {number} is damaged: {plain(problem)}") from problem
            rows.append(row)
            chains.append(chain)
        note = f"{self.path}, line {len(lines) + 1} is torn ({len(rest)} bytes without an end): left out"
        return History(rows=rows, note=note if rest else "", chains=tuple(chains) if self.chained else ())

    def _create(self) -> None:
        try:
            replace_file(self.path, b"")
        except OSError as problem:
            raise RecordError(explain("create", self.path, problem)) from problem

    def _bytes(self) -> bytes:
        try:
            return read_file(self.path)
        except OSError as problem:
            raise RecordError(explain("read", self.path, problem)) from problem

    def _catch_up(self) -> None:
        """Read what an earlier process wrote."""
        data = self._bytes()
        if data and not data.endswith(b"\n"):
            raise RecordError(f"{self.path} ends in a torn line: resume the run, which cuts it back")
        self._length, self._digest, self._chain = len(data), hashlib.sha256(data), self._last_chain(data)

    def _last_chain(self, data: bytes) -> str:
        """The chain that the next row follows."""
        if not self.chained or not data:
            return ""
        try:
            return str(canonical.decode(data[data.rfind(b"\n", 0, -1) + 1 :])[CHAIN])
        except (ValueError, KeyError, TypeError) as problem:
            raise RecordError(f"{self.path} is damaged: its last row has no {CHAIN}") from problem


def _link(before: str, row: dict[str, Any]) -> str:
    """The chain after a row."""
    return hashlib.sha256(before.encode("ascii") + canonical.encode(row)).hexdigest()


def _checked(row: dict[str, Any], before: str, line: bytes) -> str:
    """The chain of a row, which is taken out of it; `ValueError` if row or spelling are not what was written."""
    spelled = canonical.encode(row)
    found = row.pop(CHAIN, None)
    chain = _link(before, row)
    if found != chain or spelled != line:
        raise Invalid("it, or a row before it, is not the one that was written")
    return chain
