"""Display of objects: one line in a terminal, a small table in a notebook."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence
from typing import Any

LINE = 100  # characters of a repr

_STYLE = "border-collapse:collapse;font-size:90%"
_CELL = "text-align:left;padding:2px 12px 2px 0;vertical-align:top"


def brief(part: Any, depth: int = 9) -> str:
    """A part with its non-default settings: 'Uniform(fraction=0.5)', 'Plain'; parts below `depth` by name alone."""
    if isinstance(part, tuple):
        return f"[{', '.join(brief(item, depth) for item in part)}]"
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return f"{part:g}" if isinstance(part, float) else repr(part)
    shown = [
        f"{field.name}={brief(value, depth - 1)}"
        for field in dataclasses.fields(part)
        if depth > 0 and field.repr and not _is_default(field, value := getattr(part, field.name))
    ]
    name = type(part).__name__
    return f"{name}({', '.join(shown)})" if shown else name


def line(text: str) -> str:
    """The text, truncated to one line."""
    text = " ".join(text.split())
    return text if len(text) <= LINE else f"{text[: LINE - 4].rstrip(' ,')} ..."


def table(title: str, rows: Iterable[Sequence[object]], head: Sequence[object] = ()) -> str:
    """An HTML table with a caption; cells are escaped."""
    lines = [f"<tr>{''.join(_cell('th', cell) for cell in head)}</tr>"] if head else []
    lines += [f"<tr>{''.join(_cell('td', cell) for cell in row)}</tr>" for row in rows]
    caption = f"<caption style='text-align:left;font-weight:bold'>{html.escape(title)}</caption>"
    return f"<table style='{_STYLE}'>{caption}{''.join(lines)}</table>"


def _cell(tag: str, value: object) -> str:
    return f"<{tag} style='{_CELL}'>{html.escape(str(value))}</{tag}>"


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return type(value) is type(field.default) and bool(value == field.default)
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return False
