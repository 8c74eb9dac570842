"""Charts independent of a library: Matplotlib draws them as images (`static`), Plotly in the browser (`scripts/`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Values = np.ndarray | Sequence[float]

METHOD, CLIENT = "method", "client"
"""Kinds of linked items: a method or client under the pointer in one figure is highlighted in the others."""

_DIGITS = 5  # significant digits: more are not visible, and a page must stay small


class Axis(NamedTuple):
    """What an axis shows; without names it has numbers, from `first` on."""

    title: str
    names: Sequence[str] = ()
    first: int = 0
    of: str = ""  # CLIENT: its places are clients
    unit: Literal["", "whole", "share"] = ""

    def data(self) -> dict[str, Any]:
        """For the browser; what is not set is left out."""
        found = self._asdict() | {"names": list(self.names)}
        return {key: value for key, value in found.items() if value}


class Scale(NamedTuple):
    """What a colour means: quantity with its unit, and the values at both ends (None: of the data)."""

    title: str
    low: float | None = None
    high: float | None = None
    diverging: bool = False  # a diverging colour scale


class Band(NamedTuple):
    """An area around a curve; `strength` is its opacity."""

    low: Values
    high: Values
    name: str = ""
    strength: float = 0.18


@dataclass(frozen=True, eq=False, kw_only=True)
class Series:
    """One curve, or one colour of bars."""

    name: str = ""  # in the legend
    x: Values
    y: Values
    look: int = 0  # number of its colour and dashes
    bands: tuple[Band, ...] = ()
    form: Literal["line", "dashed", "thin", "step", "faint", "level"] = "line"
    link: str = ""  # "method:fedavg"

    def data(self) -> dict[str, Any]:
        """For the browser."""
        bands = [
            {"low": plain(b.low), "high": plain(b.high), "name": b.name, "strength": b.strength} for b in self.bands
        ]
        found = {"name": self.name, "x": plain(self.x), "y": plain(self.y), "look": self.look, "form": self.form}
        return found | {"bands": bands, "link": self.link}


@dataclass(frozen=True, eq=False, kw_only=True)
class Lines:
    """Curves over a common axis, with bands around them."""

    series: Sequence[Series]
    x: Axis
    y: Axis

    def data(self) -> dict[str, Any]:
        """For the browser."""
        return {"kind": "lines", "series": [s.data() for s in self.series], "x": self.x.data(), "y": self.y.data()}


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars:
    """Stacked bars; `level` marks a reference value."""

    series: Sequence[Series]
    x: Axis
    y: Axis
    level: tuple[str, float] | None = None

    def data(self) -> dict[str, Any]:
        """For the browser."""
        found = {"kind": "bars", "series": [s.data() for s in self.series], "x": self.x.data(), "y": self.y.data()}
        return found | {"level": self.level and [self.level[0], plain([self.level[1]])[0]]}


@dataclass(frozen=True, eq=False, kw_only=True)
class Heat:
    """A heat map of [rows, columns], the first row on top; NaN is empty.

    With `frames` there is a slider over (name, matrix), initially at the last. Static figures show a few of them or,
    with `summary`, the values alone.
    """

    values: np.ndarray
    down: Axis
    across: Axis
    scale: Scale
    frames: tuple[tuple[str, np.ndarray], ...] = ()
    over: str = "round"
    summary: bool = False

    def data(self) -> dict[str, Any]:
        """For the browser."""
        frames = [{"name": name, "values": [plain(row) for row in values]} for name, values in self.frames]
        found = {"kind": "heat", "down": self.down.data(), "across": self.across.data(), "scale": self.scale._asdict()}
        values = frames[-1]["values"] if frames else [plain(row) for row in self.values]
        return found | {"values": values, "frames": frames, "over": self.over}


class Strip(NamedTuple):
    """The dots of one group, with their summary."""

    name: str
    dots: Values
    mark: float | None = None  # the upright bar
    span: tuple[float, float] | None = None  # box, or interval
    look: int = 0
    link: str = ""
    names: Sequence[str] = ()  # of the dots


@dataclass(frozen=True, eq=False, kw_only=True)
class Strips:
    """Values of several groups below each other; `box` shades the spans, otherwise they are lines."""

    strips: Sequence[Strip]
    x: Axis
    spread: bool = False  # many dots are jittered over the strip's height
    box: bool = False
    zero: bool = False  # a line at zero difference
    words: tuple[str, str] = ("mark", "span")

    def data(self) -> dict[str, Any]:
        """For the browser."""
        strips = [
            strip._asdict()
            | {"dots": plain(strip.dots), "mark": plain([math.nan if strip.mark is None else strip.mark])[0]}
            | {"span": plain(strip.span) if strip.span else None, "names": list(strip.names)}
            for strip in self.strips
        ]
        flags = {"spread": self.spread, "box": self.box, "zero": self.zero, "words": self.words}
        return {"kind": "strips", "strips": strips, "x": self.x.data(), **flags}


class Colouring(NamedTuple):
    """The meaning of the points' colours: a group each, or a value in each frame."""

    title: str
    groups: Sequence[str] = ()  # [K]
    values: Sequence[Values] = ()  # frames of [K]; one frame holds for all


@dataclass(frozen=True, eq=False, kw_only=True)
class Points:
    """Clients in the plane, over frames; NaN if a client has no position yet."""

    names: Sequence[str]
    frames: tuple[tuple[str, np.ndarray], ...]  # (name, [K, 2])
    colourings: Sequence[Colouring]
    axes: tuple[str, str]
    over: str = "round"

    def data(self) -> dict[str, Any]:
        """For the browser."""
        frames = [{"name": name, "x": plain(at[:, 0]), "y": plain(at[:, 1])} for name, at in self.frames]
        colourings = [
            {"title": c.title, "groups": list(c.groups), "values": [plain(values) for values in c.values]}
            for c in self.colourings
        ]
        found = {"kind": "points", "names": list(self.names), "frames": frames, "colourings": colourings}
        return found | {"axes": self.axes, "over": self.over}


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph:
    """Clients on a circle; the width of a line between two is a count, in each frame or over all."""

    names: Sequence[str]
    edges: Sequence[tuple[int, int, int]]  # (a, b, how often)
    frames: tuple[tuple[str, Sequence[tuple[int, int]]], ...] = ()
    over: str = "round"

    def data(self) -> dict[str, Any]:
        """For the browser."""
        frames = [{"name": name, "edges": [list(edge) for edge in edges]} for name, edges in self.frames]
        edges = [list(edge) for edge in self.edges]
        return {"kind": "graph", "names": list(self.names), "edges": edges, "frames": frames, "over": self.over}


Chart = Lines | Bars | Heat | Strips | Points | Graph


@dataclass(frozen=True, eq=False, kw_only=True)
class Figure:
    """One chart with what is written above and below it."""

    name: str  # of its file, and of its place in a page
    title: str
    caption: str
    chart: Chart

    @functools.cached_property
    def figure(self) -> Canvas:
        """The Matplotlib figure; use it within `style.drawing()`."""
        from consilience.reporting import static  # Matplotlib is imported for drawing only

        return static.draw(self.chart)

    @property
    def is_tall(self) -> bool:
        """Whether the picture is so much higher than wide that paper gives it the whole width."""
        width, height = self.figure.get_size_inches()
        return bool(height > 1.25 * width)

    @functools.cached_property
    def svg(self) -> str:
        """The figure as SVG; use it within `style.drawing()`."""
        from consilience.reporting import style

        return style.svg(self)


def link(kind: str, name: str) -> str:
    """The key of a method or a client in all figures of a page."""
    return f"{kind}:{name}"


def plain(values: Values) -> list[float | int | None]:
    """Numbers for JSON: rounded, with null for NaN and infinities."""
    return [_short(float(value)) for value in np.asarray(values, dtype=np.float64).ravel()]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{_DIGITS}g}")
