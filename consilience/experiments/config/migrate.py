"""Migration of old config files: renamed keys and parts, in runs, comparisons and deployments."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from consilience.core import renamed
from consilience.core.settings import Invalid, Option, hints_of, options_of
from consilience.experiments.config.catalogue import DEFAULTS, KINDS
from consilience.experiments.config.config import FIXED
from consilience.options import parts
from consilience.runs import toml_text
from consilience.runs.toml_places import Path, TomlSpans

Known = Mapping[str, Option]


@dataclass(frozen=True, kw_only=True)
class Rename:
    """One change: the new name of the key at a path, or of the part there."""

    path: Path
    new: str
    is_key: bool

    def __str__(self) -> str:
        place = ".".join(str(step) for step in self.path)
        return f"{place} -> {self.new}" if self.is_key else f"{place} = {self.new!r}"


def migrate(text: str) -> tuple[str, list[Rename]]:
    """The text of a config file with every old name replaced, and the changes; the rest is unchanged."""
    table = toml_text.loads(text)
    found = list(renames(table))
    places, edits = TomlSpans(text), []
    for rename in found:
        if rename.is_key:
            edits += [(span, rename.new) for span in places.keys.get(rename.path, ())]
        elif rename.path in places.strings:
            edits.append((places.strings[rename.path], f'"{rename.new}"'))
    for (start, end), new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    try:
        same = toml_text.loads(text) == _renamed(table, found)
    except ValueError:  # such as both the old and the new key
        same = False
    if not same:
        raise Invalid(f"the file cannot be rewritten; change by hand: {'; '.join(map(str, found))}")
    return text, found


def renames(table: Mapping[str, Any], at: Path = ()) -> Iterator[Rename]:
    """Every old name in a config's tables."""
    for section, kind in KINDS.items():
        given = table.get(section)
        if isinstance(given, Mapping):
            try:
                known = kind.options(given.get("name", DEFAULTS[section]["name"]))
            except Invalid:  # an unknown name has unknown options
                continue
            yield from _options((*at, section), given, known)
    for section, fixed in FIXED.items():
        if isinstance(table.get(section), Mapping):
            hints = hints_of(fixed)
            known = {f.name: Option(hints[f.name]) for f in dataclasses.fields(fixed)}
            yield from _options((*at, section), table[section], known)
    compare = table.get("compare")
    methods = compare.get("methods") if isinstance(compare, Mapping) else None
    for number, entry in enumerate(methods if isinstance(methods, list) else ()):
        if isinstance(entry, Mapping):
            yield from _method((*at, "compare", "methods", number), entry)


def _method(at: Path, entry: Mapping[str, Any]) -> Iterator[Rename]:
    """The old names in one method of a comparison."""
    chosen = {"name": entry.get("algorithm"), **entry.get("options", {})}
    for rename in renames({"algorithm": chosen}):
        yield dataclasses.replace(rename, path=(*at, "options", *rename.path[1:]))
    yield from renames(entry.get("settings", {}), (*at, "settings"))


def _options(at: Path, given: Mapping[str, Any], known: Known) -> Iterator[Rename]:
    for key, value in given.items():
        new = renamed.option(key, known)
        if new is not None:
            yield Rename(path=(*at, key), new=new, is_key=True)
        option = known.get(new or key)
        if option is not None:
            yield from _value((*at, key), value, option.annotation)


def _value(at: Path, value: Any, annotation: Any) -> Iterator[Rename]:
    if isinstance(value, list):  # of parts, or a grid in a comparison
        for number, item in enumerate(value):
            yield from _value((*at, number), item, annotation)
        return
    protocol = _protocol_inside(annotation)
    if protocol is None:
        word = renamed.value(value, typing.get_args(annotation)) if typing.get_origin(annotation) is Literal else None
        if word is not None:
            yield Rename(path=at, new=word, is_key=False)
        return
    name, place = (value.get("name"), (*at, "name")) if isinstance(value, Mapping) else (value, at)
    known = parts.parts_of(protocol)
    new = renamed.part(name, known) if isinstance(name, str) else None
    if new is not None:
        yield Rename(path=place, new=new, is_key=False)
    if isinstance(value, Mapping):
        yield from _options(at, value, _part_options(new or name, protocol))


def _part_options(name: Any, protocol: type) -> Known:
    """The options of a part; of all parts of its kind if its name is missing or unknown."""
    try:
        return options_of(parts.find("", name, protocol))
    except Invalid:
        return {key: option for kind in parts.parts_of(protocol).values() for key, option in options_of(kind).items()}


def _protocol_inside(annotation: Any) -> type | None:
    """The protocol that an annotation asks for, be it in a list."""
    found = parts.protocol_in(annotation)
    inside = (_protocol_inside(member) for member in typing.get_args(annotation))
    return found or next((protocol for protocol in inside if protocol is not None), None)


def _renamed(table: Any, found: list[Rename], at: Path = ()) -> Any:
    """The tables with the renames applied, to be compared with the edited text."""
    keys = {rename.path: rename.new for rename in found if rename.is_key}
    values = {rename.path: rename.new for rename in found if not rename.is_key}
    if isinstance(table, Mapping):
        return {keys.get((*at, key), key): _renamed(value, found, (*at, key)) for key, value in table.items()}
    if isinstance(table, list):
        return [_renamed(item, found, (*at, number)) for number, item in enumerate(table)]
    return values.get(at, table)
