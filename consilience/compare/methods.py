"""The methods of a comparison: entries of a file or names on the command line, with grids of options expanded."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consilience.core.settings import Invalid, Option, nearest, refuse_unknown
from consilience.experiments.config.catalogue import KINDS, section_options
from consilience.options import parts
from consilience.runs import toml_text
from consilience.runs.names import LONGEST, plain

Table = dict[str, Any]

_ENTRY = ("algorithm", "label", "options", "settings")
_OWN_SECTIONS = ("algorithm", "seed", "name", "runs")


@dataclass(frozen=True, kw_only=True)
class Method:
    """One line of the comparison."""

    label: str
    algorithm: str
    options: Table
    settings: Table

    @property
    def slug(self) -> str:
        """The label as part of a folder name."""
        words = re.sub(r"[^A-Za-z0-9.]+", "_", self.label).strip("_.") or "method"
        room = LONGEST - len("-seed") - 20
        if len(words) <= room:
            return words
        return f"{words[: room - 9]}_{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"


def read_methods(entries: Any, grids: Sequence[str]) -> tuple[Method, ...]:
    """The methods of some entries, once for every point of their grids."""
    if not isinstance(entries, list) or not entries:
        raise Invalid(
            "nothing to compare: name methods with --algorithms fedavg,fedprox or in [[compare.methods]] tables, each "
            'with algorithm = "..."'
        )
    spelled = [_with_grids(_entry(entry, f"compare.methods[{i}]"), grids) for i, entry in enumerate(entries)]
    _refuse_idle_grids(spelled, grids)
    methods = [method for i, entry in enumerate(spelled) for method in _expanded(entry, f"compare.methods[{i}]")]
    for place, taken in (("label", [m.label for m in methods]), ("folder name", [m.slug for m in methods])):
        twice = next((text for text in taken if taken.count(text) > 1), None)
        if twice is not None:
            raise Invalid(f"two methods have the {place} {twice!r}: give each its own `label`")
    return tuple(methods)


def _entry(entry: Any, place: str) -> Table:
    if isinstance(entry, str):
        entry = {"algorithm": entry}
    if not isinstance(entry, Mapping):
        raise Invalid(f"{place} = {entry!r} must be a table with algorithm = '...'")
    refuse_unknown(entry, _ENTRY, place)
    if "algorithm" not in entry:
        raise Invalid(f"{place}.algorithm is missing: say which recipe this is")
    name, _ = KINDS["algorithm"].find(entry["algorithm"])
    for key in ("options", "settings"):
        if not isinstance(entry.get(key, {}), Mapping):
            raise Invalid(f"{place}.{key} = {entry[key]!r} must be a table")
    if not isinstance(entry.get("label", ""), str):
        raise Invalid(f"{place}.label = {entry['label']!r} must be text")
    settings = dict(entry.get("settings", {}))
    for key in _OWN_SECTIONS:
        if key in settings:
            raise Invalid(f"{place}.settings.{key} cannot be set here: use options, or compare.seeds")
    return {"algorithm": name, "label": entry.get("label", ""), "options": dict(entry.get("options", {}))} | {
        "settings": settings
    }


def _with_grids(entry: Table, grids: Sequence[str]) -> Table:
    """The entry with the options that `--grid fedprox.mu=[0.01,0.1]` (or `all.lr=...`) sets for it."""
    options = dict(entry["options"])
    for text in grids:
        who, key, values = _grid(text)
        if who in ("all", entry["algorithm"], entry["label"]):
            options[key] = values
    return {**entry, "options": options}


def _grid(text: str) -> tuple[str, str, Any]:
    key, equals, value = text.partition("=")
    who, dot, option = key.strip().partition(".")
    if not equals or not dot or not who or not option:
        raise Invalid(f"--grid {plain(text)} cannot be read: write METHOD.OPTION=[value, value], or all.OPTION=...")
    return who, option, toml_text.value(key.strip(), value.strip())


def _refuse_idle_grids(entries: Sequence[Table], grids: Sequence[str]) -> None:
    known = ["all", *dict.fromkeys(name for entry in entries for name in (entry["algorithm"], entry["label"]) if name)]
    for text in grids:
        who = _grid(text)[0]
        if who not in known:
            raise Invalid(f"--grid {plain(text)}: {who!r} is not compared{nearest(who, known)}")


def _expanded(entry: Table, place: str) -> list[Method]:
    """One method for every combination of the options that were given as lists."""
    name, options = entry["algorithm"], entry["options"]
    known = section_options("algorithm", name)
    refuse_unknown(options, known, f"{place}.options" if entry["options"] else place)
    axes = {key: _axis(f"{place}.options.{key}", value, known[key]) for key, value in options.items()}
    many = [key for key, values in axes.items() if len(values) > 1]
    found = []
    for point in itertools.product(*axes.values()):
        chosen = dict(zip(axes, point))
        varied = " ".join(f"{key}={_short(chosen[key])}" for key in many)
        label = " ".join(text for text in (entry["label"] or name, varied) if text)
        found.append(Method(label=label, algorithm=name, options=chosen, settings=entry["settings"]))
    return found


def _axis(key: str, value: Any, option: Option) -> list[Any]:
    """The values to try: a list is a grid; for an option that is itself a list, a list of lists is a grid."""
    if not isinstance(value, list):
        return [value]
    is_grid = not parts.takes_lists(option.annotation) or (value and all(isinstance(item, list) for item in value))
    if is_grid and not value:
        raise Invalid(f"{key} = [] is a grid without values: give at least one")
    return list(value) if is_grid else [value]


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "/".join(_short(item) for item in value.values())
    return f"{value:g}" if isinstance(value, float) else str(value)
