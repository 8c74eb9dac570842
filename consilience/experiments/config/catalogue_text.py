"""The catalogue as text: one line per entry, or one entry with its options."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from consilience.core.settings import Option
from consilience.experiments.config.catalogue import SECTIONS, SETTINGS, Entry
from consilience.experiments.config.families import by_family
from consilience.options.parts import describe, name_of, write

_WIDEST_NAME = 26  # of the columns of a line


def overview(title: str, entries: Sequence[Entry], width: int, *, ranked: bool = False) -> list[str]:
    """A heading with the number of entries, and a line for each; algorithms by their families, unless ranked."""
    room = min(max(len(entry.name) for entry in entries), _WIDEST_NAME)
    lines = [f"{title} ({len(entries)})"]
    if ranked or any(entry.recipe is None for entry in entries):
        return [*lines, *(_line(entry, room, width) for entry in entries)]
    known = {entry.name: entry for entry in entries}
    for family, names in by_family(known).items():
        lines += [f"  {family}", *(shortened(f"  {_line(known[name], room, width)}", width) for name in names)]
    return lines


def in_short(found: Mapping[str, Sequence[Entry]], width: int) -> list[str]:
    """Every name of every kind, without descriptions: sections of a config first, then parts of algorithms."""
    chosen = {kind: entries for kind, entries in found.items() if kind in SECTIONS}
    parts = {kind: entries for kind, entries in found.items() if kind not in (*SECTIONS, SETTINGS)}
    lines = ["A config sets"]
    top, *sections = found[SETTINGS]
    lines += wrapped(f"{top.name}: {', '.join(top.options)}", width, "  ")
    lines += [*wrapped(f"sections: {', '.join(entry.name for entry in sections)}", width, "  "), ""]
    for title, kinds in (("A config names", chosen), ("Algorithms are made of", parts)):
        lines.append(title)
        for kind, entries in kinds.items():
            names = [entry.name for entry in entries]
            if kind == "algorithms":
                lines.append(f"  algorithms ({len(names)})")
                for family, own in by_family(names).items():
                    lines += wrapped(f"{family}: {', '.join(own)}", width, "    ")
            else:
                lines += wrapped(f"{kind} ({len(names)}): {', '.join(names)}", width, "  ")
        lines.append("")
    return lines


def _line(entry: Entry, room: int, width: int) -> str:
    return shortened(f"  {entry.name:<{room}}  {entry.headline or entry.about}", width)


def entry_text(entry: Entry, width: int) -> list[str]:
    """One entry with its description and options; of the shared options only those with a default of its own."""
    lines = [entry.name, *wrapped(entry.about, width, "  ")]
    own, others = split_options(entry)
    lines += [line for key, option in own.items() for line in wrapped(option_text(key, option), width, "    ")]
    if others:
        lines += wrapped(f"shared options: {', '.join(others)} (`consilience list options`)", width, "    ")
    return lines


def split_options(entry: Entry) -> tuple[dict[str, Option], list[str]]:
    """(the options of its own and the shared ones with a default of its own, the names of the other shared ones)."""
    shared: Mapping[str, Option] = getattr(entry.recipe, "shared", {}) if entry.recipe is not None else {}
    own = set() if entry.recipe is None else set(inspect.signature(entry.recipe).parameters)
    common = {key for key in shared if key in entry.options and not _differs(entry.options[key], shared[key])} - own
    return {key: option for key, option in entry.options.items() if key not in common}, sorted(common)


def shared_options(entries: Sequence[Entry], width: int) -> list[str]:
    """The options that algorithms share, each once, with their shared defaults."""
    recipes = [entry for entry in entries if getattr(entry.recipe, "shared", None)]
    shared: Mapping[str, Option] = getattr(recipes[0].recipe, "shared", {})
    counts = {key: sum(key in entry.options for entry in recipes) for key in shared}
    lines = [f"options shared by algorithms ({len(shared)}); with each, how many of the {len(recipes)} have it"]
    for key, option in shared.items():
        annotation = next(entry.options[key].annotation for entry in recipes if key in entry.options)
        lines += wrapped(f"{option_text(key, Option(annotation, option.default))} [{counts[key]}]", width, "  ")
    return lines


def option_text(key: str, option: Option) -> str:
    """'lr: number > 0 (default 0.01)'."""
    kind = describe(option.annotation)
    if option.required:
        return f"{key}: {kind} (must be given)"
    default = option.default
    if default is None or type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        return f"{key}: {kind}"
    return f"{key}: {kind} (default {default_text(default)})"


def default_text(default: Any) -> str:
    """A default as written in a config; of a part its name and options."""
    written = write(default)
    if isinstance(written, dict):  # a part
        inner = ", ".join(f"{k} = {_plain(v)}" for k, v in written.items() if k != "name")
        return name_of(type(default)) + (f" with {inner}" if inner else "")
    return _plain(written)


def wrapped(text: str, width: int, indent: str) -> list[str]:
    """Lines of at most so many columns; those after the first are indented further."""
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False)


def shortened(line: str, width: int) -> str:
    """The line, cut with an ellipsis where it is too long."""
    return line if len(line) <= width else f"{line[: width - 1].rstrip()}…"


def _differs(option: Option, shared: Option) -> bool:
    return option.default is not None and option.default != shared.default and _usual(option) != _usual(shared)


def _usual(option: Option) -> Any:
    """The default of a shared part without settings: everyone, by_examples, weighted_mean, replace, plain."""
    if option.default is None:
        return "usual"
    return "usual" if name_of(type(option.default)) in _USUAL else option.default


_USUAL = ("everyone", "by_examples", "weighted_mean", "replace", "plain")


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'
