"""Heat maps and bars with clients on an axis, for reports and diagnoses alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from consilience.reporting import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

MOST_NAMED = 20  # clients beside a heat map
MOST_CLASSES_NAMED = 16


class Axis(NamedTuple):
    """What an axis shows; without names it has numbers, from `first` on."""

    title: str
    names: Sequence[str] = ()
    first: int = 0


class Scale(NamedTuple):
    """What a colour means: quantity with its unit, and the values at both ends (None: of the data)."""

    title: str
    low: float | None = None
    high: float | None = None
    diverging: bool = False  # two colours that meet in the middle


def clients(names: Sequence[str]) -> Axis:
    """An axis of clients: by name where they are few and are no mere numbers."""
    told = len(names) <= MOST_NAMED and any(name != str(k) for k, name in enumerate(names))
    return Axis("client", names if told else ())


def classes(names: Sequence[str], count: int) -> Axis:
    """An axis of classes: by name where they are few."""
    return Axis("class", names if len(names) == count <= MOST_CLASSES_NAMED else ())


def heat_map(values: np.ndarray, *, down: Axis, across: Axis, scale: Scale) -> Canvas:
    """[rows, columns] as colours, the first row on top; places without a value are empty."""
    rows, columns = values.shape
    figure = style.blank(height=float(np.clip(1.2 + 0.085 * rows, 2.4, 4.6)))  # clients can be told apart, no tower
    axes = figure.subplots()
    image = axes.imshow(
        values,
        aspect="auto",
        cmap=style.heat(diverging=scale.diverging),
        interpolation="none",
        vmin=scale.low,
        vmax=scale.high,
        extent=(across.first - 0.5, across.first + columns - 0.5, down.first + rows - 0.5, down.first - 0.5),
    )
    axes.grid(False)
    axes.set_facecolor(style.EMPTY)
    axes.set(xlabel=across.title, ylabel=down.title)
    _ticks(axes.xaxis, across, turned=True)
    _ticks(axes.yaxis, down)
    figure.colorbar(image, ax=axes, label=scale.title, pad=0.02)
    return figure


def bars(values: np.ndarray, *, across: Axis, up: str, line: tuple[str, float] | None = None) -> Canvas:
    """A bar per client, none where it has no value; `line` marks a level to compare with."""
    figure = style.blank()
    axes = figure.subplots()
    shown = np.where(np.isfinite(values), values, 0.0)
    axes.bar(range(len(values)), shown, width=0.8 if len(values) <= 200 else 1.0, color=style.LINES[0], lw=0)
    axes.set(xlabel=across.title, ylabel=up)
    axes.set_xlim(-0.7, len(values) - 0.3)
    axes.grid(axis="x", visible=False)
    _ticks(axes.xaxis, across, turned=True)
    if line is not None:
        axes.axhline(line[1], color=style.LINES[1], lw=1.2, ls="--", label=line[0])
        style.legend(figure, axes)
    return figure


def _ticks(axis: Any, of: Axis, *, turned: bool = False) -> None:
    if not of.names:
        style.whole_numbers(axis)
        return
    slanted: dict[str, Any] = {"rotation": 40, "ha": "right"} if turned and max(map(len, of.names)) > 3 else {}
    places = range(of.first, of.first + len(of.names))
    axis.set_ticks(places, [x if len(x) <= 12 else f"{x[:11]}…" for x in of.names], fontsize=8, **slanted)
