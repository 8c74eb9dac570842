"""Reads and writes TOML: reading has limits, since a config is not trusted; writing is canonical.

The writer is ours because every run stores its config, also where nothing but PyTorch and its own dependencies can be
installed, and `tomli-w` is not among those.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consilience.core.settings import Invalid
from consilience.runs.names import plain

MOST_BYTES = 1 << 20
DEEPEST = 16
TomlTable = dict[str, Any]
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_WORD = re.compile(  # a # only within a word, as in all.safetensors#x: after a space it would begin a comment
    r"[^\s\"'\[\]{},#=\x00-\x1f\x7f]"
    r"((?:[^\"\[\]{}#\x00-\x1f\x7f]|(?<=\S)#(?=\S))*[^\s\"\[\]{}#\x00-\x1f\x7f])?"
)

_TABLES = (".csv", ".tsv", ".parquet", ".npz")


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, or an error that names the file and what is wrong with it."""
    path = Path(path)
    if path.is_dir():
        raise Invalid(
            f"{plain(path, most=400)} is a folder: give the config file in it, such as {path / 'config.toml'}"
        )
    if path.suffix.lower() in _TABLES and path.exists():
        shown = plain(path, most=400)
        raise Invalid(f"{shown} holds data and is no config: `consilience init {shown}` writes a config for it")
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no config file {plain(path, most=400)}: give the path of a .toml file"
        ) from None
    except OSError as problem:
        raise Invalid(f"the config file {plain(path, most=400)} cannot be read: {problem.strerror}") from problem
    if len(data) > MOST_BYTES:
        raise Invalid(
            f"the config file {plain(path, most=400)} is larger than {MOST_BYTES} bytes: it cannot be a config"
        )
    try:
        return loads(data.decode("utf-8-sig"))  # some editors begin a file with a mark of its encoding
    except UnicodeDecodeError as problem:
        raise Invalid(f"the config file {plain(path, most=400)} is not UTF-8 text: save it as UTF-8") from problem
    except ValueError as problem:
        if path.suffix.lower() in (".yaml", ".yml", ".json"):
            raise Invalid(
                f"{plain(path, most=400)} is no TOML file, which a config must be; `consilience run` writes a complete "
                "one into its run folder, `consilience init` one for your data"
            ) from problem
        raise Invalid(f"the config file {plain(path, most=400)} is not TOML: {plain(problem)}") from problem


def loads(text: str) -> dict[str, Any]:
    """The tables in a TOML text; `ValueError` for anything else, endless nesting included."""
    try:
        table = tomllib.loads(text)
        _limit_depth(table)
    except RecursionError:
        raise Invalid("it is nested too deeply") from None
    return table


def value(key: str, text: str) -> Any:
    """What follows the equals sign of `key=value`: a TOML value, or a bare word, which is text."""
    try:
        table = loads(f"value = {text}")
        if list(table) != ["value"]:
            raise Invalid("it holds more than one value")
        return table["value"]
    except ValueError:
        if _WORD.fullmatch(text):
            return text
        example = f"{key}=0.1, {key}=word, {key}='[1, 2]' or {key}='\"text with quotes\"'"
        raise Invalid(f"{key} = {plain(text)} cannot be read: write {example}") from None


def dumps(table: Mapping[str, Any]) -> str:
    """Plain values first, then one [section] per table; tables inside those are written inline."""
    lines = [f"{_key(key)} = {_spelled(item, key)}" for key, item in table.items() if not isinstance(item, Mapping)]
    for section, content in table.items():
        if isinstance(content, Mapping):
            lines += ["", f"[{_key(section)}]"]
            lines += [f"{_key(key)} = {_spelled(item, f'{section}.{key}')}" for key, item in content.items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def _spelled(item: Any, place: str) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, int):
        return str(item)
    if isinstance(item, float) and math.isfinite(item):
        return repr(item)  # the shortest text that reads back to the same number
    if isinstance(item, str):
        return _quoted(item, place)
    if isinstance(item, (list, tuple)):
        return "[" + ", ".join(_spelled(member, f"{place}[{i}]") for i, member in enumerate(item)) + "]"
    if isinstance(item, Mapping):
        inner = ", ".join(f"{_key(key)} = {_spelled(member, f'{place}.{key}')}" for key, member in item.items())
        return "{" + inner + "}"
    raise Invalid(f"{plain(place)} = {plain(repr(item))} cannot be written as TOML")


def _quoted(text: str, place: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise Invalid(f"{plain(place)} is not valid Unicode: TOML cannot hold it")
    shown = (escapes.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text)
    return '"' + "".join(shown) + '"'


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quoted(name, name)


def _limit_depth(item: Any, depth: int = 0) -> None:
    if depth > DEEPEST:
        raise Invalid(f"it is nested more than {DEEPEST} deep")
    for member in item.values() if isinstance(item, dict) else item if isinstance(item, list) else ():
        _limit_depth(member, depth + 1)
