"""Settings from the command line: `algorithm.lr=0.05 rounds=30 algorithm.name=fedprox partition.min_size=`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from consilience.core.settings import SYNONYMS, Invalid
from consilience.experiments.config.catalogue import DEFAULTS, KINDS, engine_options, section_options
from consilience.runs import toml_text
from consilience.runs.names import plain
from consilience.runs.toml_text import TomlTable
from consilience.task.kinds import LOSS_SYNONYMS


def overridden(table: TomlTable, overrides: Iterable[str], source: str) -> TomlTable:
    """A copy of the table with every `key=value` applied in turn; `source` names the table's origin."""
    changed = _copied(table)
    for override in overrides:
        _apply(changed, override)
    _refuse_leftovers(table, changed, source)
    return changed


def file_and_overrides(given: Any, overrides: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """A setting in the place of the config file is an override: no file has to be named."""
    if isinstance(given, str) and "=" in given and not Path(given).exists():
        return None, (given, *overrides)
    if isinstance(given, (list, tuple)):
        raise Invalid(
            f"the config is {list(given)}: give a file or nothing there, and methods by algorithms={list(given)}"
        )
    return given, tuple(overrides)


def refuse_outside_sections(table: TomlTable, top: Sequence[str]) -> None:
    """Refuse a setting at the top of a config that belongs into a section, such as `lr`, and name the section."""
    for key in table:
        own = SYNONYMS.get(key, key)
        if key in top or own in top:
            continue
        names = {section: table.get(section, {}).get("name", DEFAULTS[section]["name"]) for section in KINDS}
        options = {
            **{section: section_options(section, name) for section, name in names.items()},
            "engine": engine_options(),
        }
        home = next((section for section, known in options.items() if own in known), None)
        if home is not None:
            raise Invalid(f"{key} is a setting of [{home}], not of the top of a config: write {home}.{own}=...")
    meant = LOSS_SYNONYMS.get(str(table.get("loss")).lower())
    if meant is not None:
        raise Invalid(f"loss = {table['loss']!r} is called {meant!r} here")


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _apply(table: TomlTable, text: str) -> None:
    """Apply `section.key=value`; an empty value resets the setting to its default."""
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    path = key.split(".")
    if not equals or not all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", part) for part in path):
        raise Invalid(f"{plain(text)!r} is not an override: write key=value, such as rounds=30 or algorithm.lr=0.05")
    if len(path) > toml_text.DEEPEST or len(value) > toml_text.MOST_BYTES:
        raise Invalid(f"{plain(key)} is nested too deeply, or its value is too long")
    parsed = toml_text.value(key, value) if value else None
    if len(path) == 1 and (key in KINDS or key == "engine") and isinstance(parsed, str):
        path = [key, "name"]
    node = table
    for depth, part in enumerate(path[:-1], 1):
        inner = node.setdefault(part, {})
        if isinstance(inner, str):  # selection = "uniform", to which an option is now added
            inner = node[part] = {"name": inner}
        if not isinstance(inner, dict):
            raise Invalid(f"{key} cannot be set: {'.'.join(path[:depth])} = {inner!r} is not a table")
        node = inner
    if parsed is None:
        node.pop(path[-1], None)
    else:
        node[path[-1]] = parsed


def _refuse_leftovers(before: TomlTable, after: TomlTable, source: str) -> None:
    """Refuse an override with another name while the file still has options of the first; name them, and the fix."""
    for section, kind in KINDS.items():
        if not isinstance(after.get(section, {}), Mapping):
            continue  # refused where the table is read
        old = {**{"name": DEFAULTS[section]["name"]}, **before.get(section, {})}
        new = {**{"name": old["name"]}, **after.get(section, {})}
        if old["name"] == new["name"]:
            continue
        known = kind.options(new["name"])
        for key, value in old.items():
            if key != "name" and key in new and key not in known:
                raise Invalid(
                    f"{section}.{key} = {value!r} in {source} belongs to {old['name']!r}, but {section}.name is now "
                    f"{new['name']!r}, which has no such setting: drop it with `{section}.{key}=` or edit the file"
                )
