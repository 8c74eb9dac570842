"""Small pictures as inline SVG: bars and heat maps that follow the page's colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

_MOST = 64  # clients in a picture


def heat_map(values: np.ndarray, rows: Sequence[str], columns: Sequence[str], *, low: float, high: float) -> str:
    """Cells from faint (low) to full colour (high); a title on each says the value."""
    values, rows = values[:_MOST], rows[:_MOST]
    values, columns = values[:, :_MOST], columns[:_MOST]
    side, left, top = 14, 46, 16
    width, height = left + side * len(columns), top + side * len(rows)
    parts = [_open(width, height)]
    for j, name in enumerate(columns):
        if len(columns) <= 24:
            parts.append(_text(left + side * j + side / 2, top - 5, _short(name), "middle"))
    for i, name in enumerate(rows):
        parts.append(_text(left - 4, top + side * i + 10, _short(name), "end"))
        for j, value in enumerate(values[i]):
            strength = 0.0 if not np.isfinite(value) else float(np.clip((value - low) / (high - low or 1), 0, 1))
            label = f"{rows[i]}, {columns[j]}: {value:.3g}"
            parts.append(
                f'<rect x="{left + side * j}" y="{top + side * i}" width="{side - 1}" height="{side - 1}" '
                f'class="cell" fill-opacity="{0.06 + 0.94 * strength:.3f}"><title>{escape(label)}</title></rect>'
            )
    return "".join([*parts, "</svg>"])


def bars(values: np.ndarray, names: Sequence[str], *, line: float | None = None, form: str = ".3g") -> str:
    """One bar per client, the largest at full length; `line` marks a level to compare with."""
    values, names = values[:_MOST], names[:_MOST]
    step, left, long = 14, 46, 260
    known = np.where(np.isfinite(values), values, 0.0)
    most = max(float(known.max(initial=0)), line or 0.0, 1e-12)
    parts = [_open(left + long + 60, step * len(values) + 4)]
    for i, value in enumerate(known):
        length = long * max(0.0, float(value)) / most
        parts.append(_text(left - 4, step * i + 11, _short(names[i]), "end"))
        parts.append(f'<rect x="{left}" y="{step * i + 2}" width="{length:.1f}" height="{step - 4}" class="cell"/>')
        shown = format(values[i], form) if np.isfinite(values[i]) else "no rows"
        parts.append(_text(left + length + 4, step * i + 11, shown, "start"))
    if line is not None:
        at = left + long * line / most
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{step * len(values) + 4}" class="mark"/>')
    return "".join([*parts, "</svg>"])


def _open(width: float, height: float) -> str:
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width * 1.3:.0f}px" role="img">'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(name: str) -> str:
    return name if len(name) <= 8 else f"{name[:7]}…"
