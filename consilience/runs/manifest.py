"""The manifest of a checkpoint: what was written, with its digests; untrusted when read."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

from consilience.core.settings import Invalid
from consilience.runs import canonical
from consilience.runs.client_log import MOST_CLIENTS, LogEntry, TableEntry
from consilience.runs.names import plain, safe_name
from consilience.runs.tree_file import CODES, TreeLayout

FORMAT = 2
READABLE = (1, FORMAT)  # 1: every tensor whole, in the checkpoint's own files
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 1 << 24  # room for about 150,000 tensors
_MOST_FILE_BYTES = 1 << 50
DTYPES = {code: dtype for dtype, code in CODES.items()}


class UnknownFormat(ValueError):
    """An undamaged manifest of a format this version does not know."""


@dataclass(frozen=True, kw_only=True)
class TreeEntry:
    """One tree's file: the file name is derived from the tree's name, so no external path is ever followed."""

    name: str
    bytes: int
    sha256: str
    layout: TreeLayout

    @property
    def file(self) -> str:
        return f"{self.name}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`, whose own digest is stored inside."""

    round: int
    trees: tuple[TreeEntry, ...]
    facts: dict[str, Any]
    tables: tuple[TableEntry, ...] = ()  # rows of clients, in the log
    log: LogEntry | None = None

    def to_bytes(self) -> bytes:
        """The canonical bytes of this manifest; `Invalid` if it is too long to be read back."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "round": self.round,
            "facts": self.facts,
            "trees": [_entry_to_json(entry) for entry in self.trees],
            "tables": [_table_to_json(table) for table in self.tables],
            "log": None if self.log is None else vars(self.log),
        }
        data = canonical.encode(content | {"digest": digest_of(content)}, pretty=True)
        if len(data) > MOST_MANIFEST_BYTES:
            raise Invalid(f"facts and tree paths take {len(data)} bytes, a manifest at most {MOST_MANIFEST_BYTES}")
        return data

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """Parse and verify; `ValueError` with the reason for anything but what `to_bytes` writes."""
        content = _expect(canonical.decode(data), dict, "the manifest")
        digest = content.pop("digest", None)
        if digest != digest_of(content):
            raise ValueError("its digest is not that of its content")
        version = content.get("format")
        if type(version) is not int or version not in READABLE:
            known = f"this version of consilience reads formats {READABLE[0]} and {FORMAT}"
            raise UnknownFormat(f"it has format {plain(repr(version))}; {known}")
        more = {"tables", "log"} if version > 1 else set()
        _exactly(content, {"format", "round", "facts", "trees"} | more, "the manifest")
        if canonical.encode(content | {"digest": digest}, pretty=True) != data:
            raise ValueError("it is not spelled as it was written")
        entries = tuple(map(_entry_from_json, _expect(content["trees"], list, "trees")))
        if len({entry.name.lower() for entry in entries}) != len(entries):
            raise ValueError("two trees share a name")
        facts = _expect(content["facts"], dict, "facts")
        tables = tuple(map(_table_from_json, _expect(content.get("tables", []), list, "tables")))
        log = None if content.get("log") is None else _log_from_json(content["log"])
        if bool(tables) != (log is not None):
            raise ValueError("tables and log do not belong together")
        round = _whole(content["round"], "round", 10**18)
        return Manifest(round=round, trees=entries, facts=facts, tables=tables, log=log)


def digest_of(content: dict[str, Any]) -> str:
    """The digest of a manifest without its `digest` entry."""
    return hashlib.sha256(canonical.encode(content)).hexdigest()


def _entry_to_json(entry: TreeEntry) -> dict[str, Any]:
    strides = {path: list(stride) for path, stride in entry.layout.strides.items()}
    return {
        "name": entry.name,
        "bytes": entry.bytes,
        "sha256": entry.sha256,
        "entries": list(entry.layout.entries),
        "strides": strides,
    }


def _entry_from_json(value: Any) -> TreeEntry:
    entry = _expect(value, dict, "a tree")
    _exactly(entry, {"name", "bytes", "sha256", "entries", "strides"}, "a tree")
    name = safe_name(entry["name"], "tree name")
    sha256 = _sha256(entry["sha256"], name)
    entries = _expect(entry["entries"], list, f"{name}.entries")
    paths = tuple(_expect(path, str, f"{name}.entries") for path in entries)
    strides = {
        path: tuple(_whole(s, f"{name}.strides", 2**62) for s in _expect(stride, list, f"{name}.strides"))
        for path, stride in _expect(entry["strides"], dict, f"{name}.strides").items()
    }
    length = _whole(entry["bytes"], f"{name}.bytes", _MOST_FILE_BYTES)
    return TreeEntry(name=name, bytes=length, sha256=sha256, layout=TreeLayout(entries=paths, strides=strides))


def _table_to_json(table: TableEntry) -> dict[str, Any]:
    fields = [[path, CODES[dtype], list(shape)] for path, dtype, shape in table.fields]
    return {**table._asdict(), "fields": fields}


def _table_from_json(value: Any) -> TableEntry:
    table = _expect(value, dict, "a table")
    _exactly(table, set(TableEntry._fields), "a table")
    fields = []
    for field in _expect(table["fields"], list, "fields"):
        path, code, shape = _expect(field, list, "a field") if len(field) == 3 else (None, None, None)
        if type(path) is not str or not path or code not in DTYPES:
            raise ValueError(f"{plain(repr(field))} is no field of a table")
        sizes = tuple(_whole(size, "a shape", 2**40) for size in _expect(shape, list, "a shape"))
        if math.prod(sizes) > 2**40:
            raise ValueError(f"a row of {plain(repr(field))} is too long")
        fields.append((path, DTYPES[code], sizes))
    if not fields or len({path for path, _, _ in fields}) != len(fields):
        raise ValueError("a table has no fields, or one twice")
    return TableEntry(
        tree=safe_name(table["tree"], "tree name"),
        prefix=_expect(table["prefix"], str, "a prefix"),
        is_vector=_expect(table["is_vector"], bool, "is_vector"),
        clients=_whole(table["clients"], "clients", MOST_CLIENTS),
        fields=tuple(fields),
    )


def _log_from_json(value: Any) -> LogEntry:
    log = _expect(value, dict, "log")
    _exactly(log, {"file", "bytes", "sha256"}, "log")
    name = safe_name(log["file"], "log.file")
    return LogEntry(
        file=name, bytes=_whole(log["bytes"], "log.bytes", _MOST_FILE_BYTES), sha256=_sha256(log["sha256"], "log")
    )


def _sha256(value: Any, place: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", _expect(value, str, f"{place}.sha256")):
        raise ValueError(f"{place}.sha256 is not a SHA-256 digest")
    return str(value)


def _expect(value: Any, kind: type, place: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{place} is {type(value).__name__}, not {kind.__name__}")
    return value


def _whole(value: Any, place: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{place} = {plain(repr(value))} is not a whole number up to {most}")
    return value


def _exactly(mapping: dict[str, Any], keys: set[str], place: str) -> None:
    if set(mapping) != keys:
        wrong = sorted(set(mapping) ^ keys)
        raise ValueError(f"{place} lacks or adds {plain(wrong)}")
