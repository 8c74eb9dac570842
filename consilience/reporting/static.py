"""Static charts: each kind drawn by Matplotlib; call it within `style.drawing()`."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from consilience.reporting import style
from consilience.reporting.charts import CLIENT, Axis, Bars, Chart, Graph, Heat, Lines, Points, Series, Strips

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

MOST_NAMED = 20  # places of an axis that have their names beside them
_MOST_ON_CIRCLE = 40
_MOST_LABELLED = 10  # clients at the side of a small matrix
_MOST_MATRICES = 6
_MOST_DOTS = 40  # curves with more points have no dots
_MOST_SHAPES = 1000  # more dots than that are one picture inside the drawing: a page must stay small
_MOST_ROWS, _MOST_COLUMNS = 200, 120  # of a static heat map: larger ones show means of neighbours
_LONGEST = 22  # characters of a label beside a strip


@functools.singledispatch
def draw(chart: Chart) -> Canvas:
    """The chart as a Matplotlib figure."""
    raise TypeError(f"no drawing of {type(chart).__name__}")


@draw.register(Lines)
def _lines(chart: Lines) -> Canvas:
    figure = style.blank()
    axes = figure.subplots()
    for series in chart.series:
        look, label = style.line(series.look), series.name or None
        for band in series.bands:
            shade = {"color": look["color"], "alpha": band.strength, "lw": 0, "label": band.name or None}
            axes.fill_between(series.x, band.low, band.high, **shade)
        _curve(axes, series, look, label)
    _frame(axes, chart.x, chart.y)
    style.legend(figure, axes)
    return figure


def _curve(axes: Any, series: Series, look: dict[str, Any], label: str | None) -> None:
    if series.form == "step":
        axes.step(series.x, series.y, where="post", label=label, **look)
    elif series.form == "level":
        axes.plot(series.x, series.y, color=style.SOFT, lw=0.9, ls=":", label=label)
    elif series.form == "dashed":
        axes.plot(series.x, series.y, label=label, color=look["color"], ls=(0, (4, 4)))
    elif series.form == "thin":
        axes.plot(series.x, series.y, lw=0.8, alpha=0.6, label=label, **look)
    elif series.form == "faint":
        axes.plot(series.x, series.y, lw=0.9, alpha=0.35, color=look["color"], label=label)
    else:
        dot = "o" if 0 < len(series.x) <= _MOST_DOTS else None
        axes.plot(series.x, series.y, label=label, marker=dot, ms=3, **look)


@draw.register(Bars)
def _bars(chart: Bars) -> Canvas:
    figure = style.blank()
    axes = figure.subplots()
    below: dict[float, float] = {}
    for series in chart.series:
        x, shown = np.asarray(series.x), np.nan_to_num(np.asarray(series.y, dtype=np.float64))
        under = np.array([below.get(place, 0.0) for place in x.tolist()])
        width = 0.8 if len(x) <= 200 else 1.0
        hue = style.LINES[series.look % len(style.LINES)]
        axes.bar(x, shown, bottom=under, width=width, color=hue, lw=0, label=series.name or None)
        below |= dict(zip(x.tolist(), under + shown))
    _frame(axes, chart.x, chart.y)
    places = [place for series in chart.series for place in np.asarray(series.x).tolist()]
    if places:
        axes.set_xlim(min(places) - 0.7, max(places) + 0.7)
    axes.grid(axis="x", visible=False)
    if chart.level is not None:
        axes.axhline(
            chart.level[1], color=style.LINES[1], lw=1.2, ls="--", label=f"{chart.level[0]} {chart.level[1]:.4g}"
        )
    style.legend(figure, axes)
    return figure


@draw.register(Heat)
def _heat(chart: Heat) -> Canvas:
    if len(chart.frames) > 1 and not chart.summary:
        return _matrices(chart)
    values = chart.values
    rows, columns = values.shape
    square = chart.down.of == chart.across.of == CLIENT
    height = 3.4 if square else float(np.clip(1.2 + 0.085 * rows, 2.4, 4.6))  # inches
    figure = style.blank(height=height)
    axes = figure.subplots()
    image = axes.imshow(
        _pooled(_pooled(values, _MOST_ROWS).T, _MOST_COLUMNS).T,
        aspect="auto",
        cmap=style.heat(diverging=chart.scale.diverging),
        interpolation="none",
        vmin=chart.scale.low,
        vmax=chart.scale.high,
        extent=(
            *(chart.across.first - 0.5, chart.across.first + columns - 0.5),
            *(chart.down.first + rows - 0.5, chart.down.first - 0.5),
        ),
    )
    axes.grid(False)
    axes.set_facecolor(style.EMPTY)
    axes.set(xlabel=chart.across.title, ylabel=chart.down.title)
    _ticks(axes.xaxis, chart.across, turned=True)
    _ticks(axes.yaxis, chart.down)
    figure.colorbar(image, ax=axes, label=chart.scale.title, pad=0.02)
    return figure


def _pooled(values: np.ndarray, most: int) -> np.ndarray:
    """Means of neighbouring rows if there are too many to show."""
    if len(values) <= most:
        return values
    size = -(-len(values) // most)
    blocks = [values[start : start + size] for start in range(0, len(values), size)]
    known = [np.isfinite(block).sum(0) for block in blocks]
    sums = [np.nansum(block, 0) for block in blocks]
    return np.stack([np.where(n > 0, total / np.maximum(n, 1), np.nan) for total, n in zip(sums, known)])


def _matrices(chart: Heat) -> Canvas:
    """A few of the frames beside each other, with one scale."""
    shown = [chart.frames[i] for i in evenly(len(chart.frames), _MOST_MATRICES)]
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure = style.blank(height=0.3 + 1.38 * lines, layout="compressed")
    grid = figure.subplots(lines, columns, squeeze=False)
    values = np.concatenate([matrix.ravel() for _, matrix in shown])
    low = float(np.nanmin(values)) if chart.scale.low is None else chart.scale.low
    high = float(np.nanmax(values)) if chart.scale.high is None else chart.scale.high
    image: Any = None
    for place, axes in enumerate(grid.ravel()):
        if place >= len(shown):
            axes.set_visible(False)
            continue
        name, matrix = shown[place]
        colours = style.heat(diverging=chart.scale.diverging)
        image = axes.imshow(matrix, cmap=colours, interpolation="none", vmin=low, vmax=high)
        axes.set_title(f"{chart.over} {name}" if name.isdecimal() else name, pad=3, fontsize=7)
        axes.grid(False)
        axes.set_facecolor(style.EMPTY)
        axes.tick_params(labelsize=7, length=2)
        _small_ticks(axes.xaxis, chart.across, len(matrix), 90)
        _small_ticks(axes.yaxis, chart.down, len(matrix), 0)
    figure.supxlabel(chart.across.title, fontsize=9.2)
    figure.supylabel(chart.down.title, fontsize=9.2)
    figure.colorbar(image, ax=grid.ravel().tolist(), label=chart.scale.title, pad=0.02)
    return figure


def _small_ticks(axis: Any, of: Axis, count: int, turned: float) -> None:
    if of.names and count <= _MOST_LABELLED:
        axis.set_ticks(range(count), [name[:6] for name in of.names], rotation=turned)
    elif of.names:
        axis.set_ticks([])
    else:
        style.whole_numbers(axis, most=4)


@draw.register(Strips)
def _strips(chart: Strips) -> Canvas:
    strips = chart.strips
    figure = style.blank(height=max(1.9, 0.75 + (0.42 if chart.spread else 0.26) * len(strips)))
    axes = figure.subplots()
    if chart.zero:
        axes.axvline(0, color=style.SOFT, lw=0.9, ls="--")
    for place, strip in enumerate(strips):
        dots, hue = np.asarray(strip.dots, dtype=np.float64), style.LINES[strip.look % len(style.LINES)]
        # spread evenly, the same each time
        offsets = (np.arange(len(dots)) * 0.618034 % 1 - 0.5) * 0.5 if chart.spread else np.zeros(len(dots))
        many = sum(len(strip.dots) for strip in strips) > _MOST_SHAPES
        size, faint = (9, 0.45) if chart.spread else (16, 0.6)
        axes.scatter(dots, place + offsets, s=size, color=hue, alpha=faint, lw=0, rasterized=many, zorder=2)
        if strip.span is not None and chart.box:
            axes.fill_betweenx([place - 0.3, place + 0.3], *strip.span, color=hue, alpha=0.2, lw=0)
        elif strip.span is not None:
            axes.plot(strip.span, [place, place], color=hue, lw=1.6)
        if strip.mark is not None:
            axes.plot([strip.mark, strip.mark], [place - 0.3, place + 0.3], color=style.INK, lw=1.6)
    names = [strip.name if len(strip.name) <= _LONGEST else f"{strip.name[: _LONGEST - 1]}…" for strip in strips]
    shown = range(len(strips)) if any(names) else ()
    axes.set_yticks(shown, [names[i] for i in shown], fontsize=8 if len(strips) > 3 else 9.2)
    axes.set_ylim(len(strips) - 0.45, -0.55)
    axes.set_xlabel(chart.x.title)
    axes.grid(axis="y", visible=False)
    return figure


@draw.register(Points)
def _points(chart: Points) -> Canvas:
    """The last frame, coloured by the first of the colourings."""
    figure = style.blank(height=3.4)
    axes = figure.subplots()
    at, colouring = chart.frames[-1][1], chart.colourings[0]
    if colouring.groups:
        for number, group in enumerate(sorted(set(colouring.groups), key=_counted)):
            mine = np.array([own == group for own in colouring.groups])
            hue = style.LINES[number % len(style.LINES)]
            axes.scatter(at[mine, 0], at[mine, 1], s=38, color=hue, label=group, lw=0, alpha=0.85)
    else:
        values = np.asarray(colouring.values[-1], dtype=np.float64)
        image = axes.scatter(at[:, 0], at[:, 1], s=38, c=values, cmap=style.heat(), lw=0)
        figure.colorbar(image, ax=axes, label=colouring.title, pad=0.02)
    if len(chart.names) <= _MOST_ON_CIRCLE:
        for name, (x, y) in zip(chart.names, at):
            if np.isfinite(x):
                axes.annotate(name[:10], (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.set(xlabel=chart.axes[0], ylabel=chart.axes[1])
    axes.set_aspect("equal", adjustable="datalim")
    style.legend(figure, axes)
    return figure


@draw.register(Graph)
def _graph(chart: Graph) -> Canvas:
    figure = style.blank(height=4.3)
    axes = figure.subplots()
    count = len(chart.names)
    angle = np.pi / 2 - 2 * np.pi * np.arange(count) / count
    x, y = np.cos(angle), np.sin(angle)
    most = max(times for *_, times in chart.edges)
    for a, b, times in sorted(chart.edges, key=lambda edge: edge[2]):
        share = times / most
        axes.plot(x[[a, b]], y[[a, b]], color=style.LINES[0], lw=0.6 + 2.6 * share, alpha=0.25 + 0.55 * share)
    axes.scatter(x, y, s=70 if count <= _MOST_ON_CIRCLE else 14, color=style.LINES[1], zorder=3, lw=0)
    if count <= _MOST_ON_CIRCLE:
        for name, left, up in zip(chart.names, x, y):
            side = "center" if abs(left) < 0.2 else "left" if left > 0 else "right"
            axes.text(1.1 * left, 1.1 * up, name[:14], ha=side, va="center", fontsize=8)
    axes.set(xlim=(-1.45, 1.45), ylim=(-1.25, 1.25), aspect="equal")
    axes.axis("off")
    return figure


def _counted(name: str) -> list[str | int]:
    """Sorts `group 10` after `group 9`, as the browser does."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def _frame(axes: Any, x: Axis, y: Axis) -> None:
    axes.set(xlabel=x.title, ylabel=y.title)
    for axis, of in ((axes.xaxis, x), (axes.yaxis, y)):
        if of.names or of.unit == "whole":
            _ticks(axis, of, turned=axis is axes.xaxis)
    if y.unit == "share":
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -0.02), min(max(high, low + 0.02), 1.02))


def _ticks(axis: Any, of: Axis, *, turned: bool = False) -> None:
    if not 0 < len(of.names) <= MOST_NAMED:
        style.whole_numbers(axis)
        return
    slanted: dict[str, Any] = {"rotation": 40, "ha": "right"} if turned and max(map(len, of.names)) > 3 else {}
    places = range(of.first, of.first + len(of.names))
    axis.set_ticks(places, [x if len(x) <= 12 else f"{x[:11]}…" for x in of.names], fontsize=8, **slanted)
