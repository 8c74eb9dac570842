"""Metrics over rounds, traffic and time: one curve per group, with a band over its seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from consilience.core.metrics import SHARE
from consilience.reporting import style
from consilience.reporting.groups import Band, Group, metrics_of
from consilience.reporting.runs import RunData
from consilience.reporting.style import Figure
from consilience.runs.metric_table import Column, by_importance, columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


_READING = {
    "train_loss": "It should fall together with the test loss; if the test loss rises meanwhile, clients overfit.",
    "drift_relative": "Lower means that clients stay close to the global model; a drift that grows over rounds means "
    "that they pull apart.",
}


class _Cost(NamedTuple):
    """What quality is drawn against."""

    name: str
    title: str
    axis: str
    words: str
    of: Callable[[RunData], tuple[np.ndarray, np.ndarray]]  # (rounds, spent so far)


def over_rounds(groups: Sequence[Group]) -> list[Figure]:
    """One picture per metric that any run has."""
    pictures = [_metric(column, groups) for column in _ranked(groups) if column.has_figure]
    return [picture for picture in pictures if picture is not None]


def against_costs(groups: Sequence[Group]) -> list[Figure]:
    """Quality against bytes, wall seconds and virtual seconds, each run a curve of its own."""
    found = (c for c in _ranked(groups) if c.has_figure and any(group.band(c.key).curves for group in groups))
    quality = next(found, None)
    pictures = [_traffic(groups)]
    if quality is not None:
        pictures += [_against(groups, quality, cost) for cost in _costs()]
    return [picture for picture in pictures if picture is not None]


def _ranked(groups: Sequence[Group]) -> tuple[Column, ...]:
    """The columns of all runs, those of the main metric first."""
    return columns(by_importance(metrics_of(groups)))


def _metric(metric: Column, groups: Sequence[Group]) -> Figure | None:
    bands = [group.band(metric.key) for group in groups]
    if not any(band.curves for band in bands):
        return None
    figure = style.blank()
    axes = figure.subplots()
    for number, (group, band) in enumerate(zip(groups, bands)):
        if not band.curves:  # it has no such metric, and no place in the legend
            continue
        look = style.line(number)
        for rounds, values in band.curves if len(band.curves) > 1 else ():
            beyond = slice(max(0, int(np.searchsorted(rounds, band.rounds[-1])) if len(band.rounds) else 0), None)
            axes.plot(rounds[beyond], values[beyond], lw=0.8, alpha=0.6, **look)
        if len(band.curves) > 1 and len(band.rounds):
            axes.fill_between(band.rounds, band.low, band.high, color=look["color"], alpha=0.18, lw=0)
        marker = "o" if 0 < len(band.rounds) <= 12 else None
        axes.plot(band.rounds, band.mean, label=group.label if len(groups) > 1 else None, marker=marker, ms=3.2, **look)
    _frame(figure, axes, "round", metric.axis, share=metric.unit == SHARE)
    caption = f"{metric.caption.rstrip('.')}. {_reading(metric)}{_band_words(bands)}"
    return Figure(name=metric.key, title=metric.heading, caption=caption, figure=figure)


def _costs() -> list[_Cost]:
    sent = "bytes sent so far, both ways, before any compression"
    wall = "wall-clock time on the machine that ran it; the first round includes the choice of a lane"
    virtual = "time that the simulated clients and links would have taken"
    return [
        _Cost("traffic", "traffic", "traffic, up and down", sent, _bytes),
        _Cost("time", "wall-clock time", "wall-clock time (s)", wall, RunData.seconds),
        _Cost("virtual_time", "simulated time", "simulated time (s)", virtual, _virtual),
    ]


def _against(groups: Sequence[Group], metric: Column, cost: _Cost) -> Figure | None:
    figure = style.blank()
    axes, drawn = figure.subplots(), 0
    for number, group in enumerate(groups):
        label: str | None = group.label if len(groups) > 1 else None
        for run in group.runs:
            (rounds, values), (known, spent) = run.curve(metric.key), cost.of(run)
            shared, here, there = np.intersect1d(rounds, known, return_indices=True)
            if not len(shared) or not spent[there].max() > 0:
                continue
            axes.plot(spent[there], values[here], label=label, lw=1.3, marker="o", ms=2.6, **style.line(number))
            label, drawn = None, drawn + 1  # a group is named once
    if not drawn:
        return None
    if cost.name == "traffic":
        style.bytes_on(axes.xaxis)
    _frame(figure, axes, cost.axis, metric.axis, share=metric.unit == SHARE, rounds=False)
    end = "top" if metric.better != "lower" else "bottom"
    title = f"{metric.heading} against {cost.title}"
    caption = f"{metric.heading} against {cost.words}; each dot is a test. The nearer to the {end} left, the better."
    return Figure(name=f"{metric.key}_against_{cost.name}", title=title, caption=caption, figure=figure)


def _traffic(groups: Sequence[Group]) -> Figure | None:
    figure = style.blank()
    axes, drawn = figure.subplots(), 0
    for group in groups:
        run = group.first
        ways = {way: run.curve(f"bytes_{way}_total") for way in ("up", "down")}
        for name, (rounds, sent) in (ways if len(groups) == 1 else {group.label: _bytes(run)}).items():
            axes.plot(rounds, sent, label=name, marker=_dot(rounds), ms=3.2, **style.line(len(axes.lines)))
            drawn += len(rounds)
    if not drawn:
        return None
    style.bytes_on(axes.yaxis)
    _frame(figure, axes, "round", "traffic so far")
    said = "up and down together" if len(groups) > 1 else "from clients to the server (up) and back (down)"
    caption = (
        f"Bytes sent so far by all clients, {said}, before any compression. A straight line means that every round "
        "costs the same; a flatter one is cheaper."
    )
    return Figure(name="traffic", title="Traffic", caption=caption, figure=figure)


def _frame(figure: Canvas, axes: Any, x: str, y: str, *, share: bool = False, rounds: bool = True) -> None:
    axes.set(xlabel=x, ylabel=y)
    if rounds:
        style.whole_numbers(axes.xaxis)
    if share:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -0.02), min(max(high, low + 0.02), 1.02))
    style.legend(figure, axes)


def _band_words(bands: Sequence[Band]) -> str:
    if max(len(band.curves) for band in bands) <= 1:
        return ""
    uneven = any(len(rounds) > len(band.rounds) for band in bands for rounds, _ in band.curves)
    said = " Line: mean over seeds; band: from the lowest to the highest seed; a narrow band: seeds matter little."
    return said + " Thin: rounds that some seeds lack." * uneven


def _reading(metric: Column) -> str:
    """How to read a curve, and what a good one looks like."""
    if metric.better == "":
        return _READING.get(metric.key, "")
    way = "rises" if metric.better == "higher" else "falls"
    return f"{metric.better.capitalize()} is better; a good curve {way} quickly and then levels off."


def _dot(rounds: np.ndarray) -> str | None:
    return "o" if len(rounds) <= 12 else None


def _bytes(run: RunData) -> tuple[np.ndarray, np.ndarray]:
    rounds, up = run.curve("bytes_up_total")
    _, down = run.curve("bytes_down_total")
    return rounds, up + down


def _virtual(run: RunData) -> tuple[np.ndarray, np.ndarray]:
    return run.curve("simulated_seconds")
