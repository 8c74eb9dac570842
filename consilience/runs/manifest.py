"""The manifest of a checkpoint: what was written, with its digests; untrusted when read."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from consilience.core.settings import Invalid
from consilience.runs import canonical
from consilience.runs.names import plain, safe_name
from consilience.runs.tree_file import TreeLayout

FORMAT = 1
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 1 << 24  # room for about 150,000 tensors
_MOST_FILE_BYTES = 1 << 50


class UnknownFormat(ValueError):
    """An undamaged manifest of a format this version does not know."""


@dataclass(frozen=True, kw_only=True)
class TreeEntry:
    """One tree's file: its name gives the file's name, so no path from outside is ever followed."""

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

    def to_bytes(self) -> bytes:
        """The one spelling of this manifest; `Invalid` when it is too long to be read back."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "round": self.round,
            "facts": self.facts,
            "trees": [_entry_to_json(entry) for entry in self.trees],
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
        if type(version) is not int or version != FORMAT:
            known = f"this version of consilience reads format {FORMAT}"
            raise UnknownFormat(f"it has format {plain(repr(version))}; {known}")
        _exactly(content, {"format", "round", "facts", "trees"}, "the manifest")
        if canonical.encode(content | {"digest": digest}, pretty=True) != data:
            raise ValueError("it is not spelled as it was written")
        entries = tuple(map(_entry_from_json, _expect(content["trees"], list, "trees")))
        if len({entry.name.lower() for entry in entries}) != len(entries):
            raise ValueError("two trees share a name")
        facts = _expect(content["facts"], dict, "facts")
        return Manifest(round=_whole(content["round"], "round", 10**18), trees=entries, facts=facts)


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
    sha256 = _expect(entry["sha256"], str, f"{name}.sha256")
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(f"{name}.sha256 is not a SHA-256 digest")
    entries = _expect(entry["entries"], list, f"{name}.entries")
    paths = tuple(_expect(path, str, f"{name}.entries") for path in entries)
    strides = {
        path: tuple(_whole(s, f"{name}.strides", 2**62) for s in _expect(stride, list, f"{name}.strides"))
        for path, stride in _expect(entry["strides"], dict, f"{name}.strides").items()
    }
    length = _whole(entry["bytes"], f"{name}.bytes", _MOST_FILE_BYTES)
    return TreeEntry(name=name, bytes=length, sha256=sha256, layout=TreeLayout(entries=paths, strides=strides))


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
