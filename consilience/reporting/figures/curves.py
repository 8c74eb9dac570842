"""Metrics over rounds, traffic and time: one curve per group, with a band over its seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from consilience.core.metrics import SHARE
from consilience.reporting import charts
from consilience.reporting.charts import METHOD, Axis, Figure, Lines, Series
from consilience.reporting.groups import Band, Group, metrics_of
from consilience.reporting.runs import RunData
from consilience.runs.metric_table import Column, by_importance, columns

ROUNDS = Axis("round", unit="whole")
_BYTE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))

_READING = {
    "train_loss": "It should fall together with the test loss; if the test loss rises meanwhile, clients overfit.",
    "drift_relative": "Lower means that clients stay close to the global model; a drift that grows over rounds means "
    "that they pull apart.",
}


class _Cost(NamedTuple):
    """A cost against which quality is drawn."""

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


def _sample_words(metric: Column, groups: Sequence[Group]) -> str:
    """The number of tested clients, if they are a sample, and the standard error of their mean."""
    whose = {"clients": "client", "personal": "personal"}.get(metric.role, "")
    tested, total = (
        max((max(group.final(f"{whose}_clients_{what}"), default=0) for group in groups), default=0)
        for what in ("tested", "total")
    )
    if not tested:
        return ""
    errors = [error for group in groups for error in group.final(metric.key.replace("_mean", "_standard_error"))]
    sure = f", standard error of the mean at most {max(errors):.4f}" if errors and metric.key.endswith("_mean") else ""
    return f" Sample of {tested:,.0f} of {total:,.0f} clients{sure}."


def _ranked(groups: Sequence[Group]) -> tuple[Column, ...]:
    """The columns of all runs, those of the main metric first."""
    return columns(by_importance(metrics_of(groups)))


def _metric(metric: Column, groups: Sequence[Group]) -> Figure | None:
    bands = [group.band(metric.key) for group in groups]
    if not any(band.curves for band in bands):
        return None
    series = [own for n, (group, band) in enumerate(zip(groups, bands)) for own in _banded(n, group, band, len(groups))]
    chart = Lines(series=series, x=ROUNDS, y=_quality(metric))
    caption = f"{metric.caption.rstrip('.')}. {_reading(metric)}{_band_words(bands)}{_sample_words(metric, groups)}"
    return Figure(name=metric.key, title=metric.heading, caption=caption, chart=chart)


def _banded(number: int, group: Group, band: Band, groups: int) -> list[Series]:
    """A group's mean with the band over its seeds, and thin curves for seeds with more rounds."""
    if not band.curves:  # without this metric, it is not in the legend
        return []
    own = charts.link(METHOD, group.label)
    found = []
    for rounds, values in band.curves if len(band.curves) > 1 else ():
        first = max(0, int(np.searchsorted(rounds, band.rounds[-1])) if len(band.rounds) else 0)
        if len(rounds) - first > 1:
            found.append(Series(x=rounds[first:], y=values[first:], look=number, form="thin", link=own))
    around = (charts.Band(band.low, band.high),) if len(band.curves) > 1 and len(band.rounds) else ()
    name = group.label if groups > 1 else ""
    return [*found, Series(name=name, x=band.rounds, y=band.mean, look=number, bands=around, link=own)]


def _quality(metric: Column) -> Axis:
    return Axis(metric.axis, unit="share" if metric.unit == SHARE else "")


def _costs() -> list[_Cost]:
    sent = "bytes sent so far, both ways, before any compression"
    wall = "wall-clock time on the machine that ran it; the first round includes the choice of a lane"
    virtual = "time that the simulated clients and links would have taken"
    return [
        _Cost("traffic", "traffic", "traffic, up and down", sent, _bytes),
        _Cost("time", "wall-clock time", "wall-clock time", wall, RunData.seconds),
        _Cost("virtual_time", "simulated time", "simulated time", virtual, _virtual),
    ]


def _against(groups: Sequence[Group], metric: Column, cost: _Cost) -> Figure | None:
    series = []
    for number, group in enumerate(groups):
        name, own = group.label if len(groups) > 1 else "", charts.link(METHOD, group.label)
        for run in group.runs:
            (rounds, values), (known, spent) = run.curve(metric.key), cost.of(run)
            shared, here, there = np.intersect1d(rounds, known, return_indices=True)
            if not len(shared) or not spent[there].max() > 0:
                continue
            series.append(Series(name=name, x=spent[there], y=values[here], look=number, link=own))
            name = ""  # a group is named once
    if not series:
        return None
    series, unit = _in_bytes(series, "x") if cost.name == "traffic" else (series, "s")
    chart = Lines(series=series, x=Axis(f"{cost.axis} ({unit})"), y=_quality(metric))
    end = "top" if metric.better != "lower" else "bottom"
    title = f"{metric.heading} against {cost.title}"
    what = "each line is one run (a seed), " if any(len(group.runs) > 1 for group in groups) else ""
    caption = (
        f"{metric.heading} against {cost.words}; {what}each dot is a test. The nearer to the {end} left, the better."
    )
    return Figure(name=f"{metric.key}_against_{cost.name}", title=title, caption=caption, chart=chart)


def _traffic(groups: Sequence[Group]) -> Figure | None:
    series: list[Series] = []
    for number, group in enumerate(groups):
        run, own = group.first, charts.link(METHOD, group.label)
        ways = {way: run.curve(f"bytes_{way}_total") for way in ("up", "down")}
        for name, (rounds, sent) in (ways if len(groups) == 1 else {group.label: _bytes(run)}).items():
            look = number if len(groups) > 1 else len(series)
            # upload and download are often equal
            form: Literal["dashed", "line"] = "dashed" if name == "down" and len(groups) == 1 else "line"
            series += [Series(name=name, x=rounds, y=sent, look=look, form=form, link=own)] if len(rounds) else []
    if not series:
        return None
    series, unit = _in_bytes(series, "y")
    chart = Lines(series=series, x=ROUNDS, y=Axis(f"traffic so far ({unit})"))
    said = "up and down together" if len(groups) > 1 else "from clients to the server (up) and back (down)"
    caption = (
        f"Bytes sent so far by all clients, {said}, before any compression. A straight line means that every round "
        "costs the same; a flatter one is cheaper."
    )
    return Figure(name="traffic", title="Traffic", caption=caption, chart=chart)


def _in_bytes(series: Sequence[Series], along: Literal["x", "y"]) -> tuple[list[Series], str]:
    """Curves of bytes in the unit that suits the largest, and its name."""
    most = max(float(np.max(getattr(one, along))) for one in series)
    unit, size = next(((name, size) for name, size in _BYTE_UNITS if most >= size), _BYTE_UNITS[-1])
    scaled: list[dict[str, Any]] = [{along: np.asarray(getattr(one, along)) / size} for one in series]
    return [dataclasses.replace(one, **values) for one, values in zip(series, scaled)], unit


def _band_words(bands: Sequence[Band]) -> str:
    if max(len(band.curves) for band in bands) <= 1:
        return ""
    uneven = any(len(rounds) > len(band.rounds) for band in bands for rounds, _ in band.curves)
    said = " Line: mean over seeds; band: from the lowest to the highest seed; a narrow band: seeds matter little."
    return said + " Thin: rounds that some seeds lack." * uneven


def _reading(metric: Column) -> str:
    """How to read a curve, and whether higher or lower is better."""
    if metric.better == "":
        return _READING.get(metric.key, "")
    way = "rises" if metric.better == "higher" else "falls"
    return f"{metric.better.capitalize()} is better; a good curve {way} quickly and then levels off."


def _bytes(run: RunData) -> tuple[np.ndarray, np.ndarray]:
    rounds, up = run.curve("bytes_up_total")
    _, down = run.curve("bytes_down_total")
    return rounds, up + down


def _virtual(run: RunData) -> tuple[np.ndarray, np.ndarray]:
    return run.curve("simulated_seconds")
