"""The catalogue for people: what can be named, with options, types, ranges and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape

from consilience.core.settings import Option
from consilience.experiments.config.catalogue import Entry
from consilience.options.parts import describe, name_of, write


def entries(title: str, found: Sequence[Entry]) -> RenderableType:
    """One kind of thing in the catalogue, with options, types, ranges and defaults."""
    lines = [f"[bold]{escape(title)}[/bold]"]
    for entry in found:
        lines.append(f"  [bold cyan]{escape(entry.name)}[/bold cyan]  {escape(entry.about)}")
        lines += [f"      {escape(option_text(key, option))}" for key, option in entry.options.items()]
    return Group(*lines, "")


def option_text(key: str, option: Option) -> str:
    """'lr: number > 0 (default 0.01)'."""
    kind = describe(option.annotation)
    if option.required:
        return f"{key}: {kind} (must be given)"
    default = option.default
    if default is None or type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        return f"{key}: {kind}"
    written = write(default)
    if isinstance(written, dict):  # a part
        inner = ", ".join(f"{k} = {_plain(v)}" for k, v in written.items() if k != "name")
        return f"{key}: {kind} (default {name_of(type(default))}" + (f" with {inner})" if inner else ")")
    return f"{key}: {kind} (default {_plain(written)})"


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
