"""How evenly a model serves the clients: the spread of the main metric over them, at the end and over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from consilience.core.metrics import MetricRow
from consilience.reporting import style
from consilience.reporting.groups import Group, metrics_of
from consilience.reporting.runs import RunData
from consilience.reporting.style import Figure
from consilience.runs.metric_table import axis_of, by_importance

_LEVELS = (0, 10, 25, 50, 75, 90, 100)


def at_the_end(groups: Sequence[Group]) -> list[Figure]:
    """Every client of every group at its last test: a dot each, and quartiles."""
    pictures = [_strips(*field, groups) for field in _fields(metrics_of(groups))]
    return [picture for picture in pictures if picture is not None]


def over_rounds(run: RunData) -> list[Figure]:
    """The same of one run over rounds, as nested bands."""
    pictures = [_bands(*field, run) for field in _fields(run.metrics)]
    return [picture for picture in pictures if picture is not None]


def _fields(metrics: Sequence[MetricRow]) -> Sequence[tuple[str, str, str, str]]:
    """(field of a client's row, axis, title, better): of the main metric, and of the loss, which old runs have."""
    shown = [row for row in by_importance(metrics) if row.main or row.key == "loss"]
    found = []
    for row in shown:
        found.append((row.key, axis_of(row), f"Clients' {row.title}", row.better))
        found.append((f"personal_{row.key}", axis_of(row), f"Personal {row.title}", row.better))
    return found


def client_values(run: RunData, kind: str) -> dict[int, np.ndarray]:
    """By round: one value per client with test rows, or the percentiles that were recorded instead."""
    found = {}
    for number, row in run.clients.items():
        values = row.get(kind, row.get(f"{kind}_percentiles"))
        if number <= len(run.rows) and isinstance(values, list):
            known = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
            if np.isfinite(known).any():
                found[number] = known[np.isfinite(known)]
    return found


def _strips(kind: str, axis: str, title: str, better: str, groups: Sequence[Group]) -> Figure | None:
    pooled = [(number, group, _last(group, kind)) for number, group in enumerate(groups)]
    pooled = [(number, group, values) for number, group, values in pooled if len(values)]
    if not pooled:
        return None
    figure = style.blank(height=max(1.9, 0.75 + 0.42 * len(pooled)))
    axes = figure.subplots()
    for place, (number, _, values) in enumerate(pooled):
        _strip(axes, place, values, style.LINES[number % len(style.LINES)])
    names = [group.label if len(groups) > 1 else "" for _, group, _ in pooled]
    places = range(len(pooled)) if len(groups) > 1 else ()
    axes.set_yticks(places, [names[i] if len(names[i]) <= 22 else f"{names[i][:21]}…" for i in places])
    axes.set_ylim(len(pooled) - 0.45, -0.55)
    axes.set_xlabel(axis)
    axes.grid(axis="y", visible=False)
    seeds = max(len(group.runs) for group in groups)
    caption = "Each dot is one client at the last test; the box holds the middle half, the bar is the median." + (
        " Clients of all seeds are drawn together." if seeds > 1 else ""
    )
    caption += f" Dots close together mean that clients are served alike; {better} is better."
    return Figure(name=f"clients_{kind}", title=title, caption=caption, figure=figure)


def _strip(axes: Any, place: int, values: np.ndarray, colour: str) -> None:
    low, middle, high = np.percentile(values, (25, 50, 75))
    offsets = (np.arange(len(values)) * 0.618034 % 1 - 0.5) * 0.5  # spread evenly, the same each time
    axes.scatter(values, place + offsets, s=9, color=colour, alpha=0.45, lw=0)
    axes.fill_betweenx([place - 0.3, place + 0.3], low, high, color=colour, alpha=0.2, lw=0)
    axes.plot([middle, middle], [place - 0.3, place + 0.3], color=style.INK, lw=1.6)


def _bands(kind: str, axis: str, title: str, better: str, run: RunData) -> Figure | None:
    found = client_values(run, kind)
    if len(found) < 2:
        return None
    rounds = np.array(sorted(found))
    levels = np.stack([np.percentile(found[number], _LEVELS) for number in rounds])  # [rounds, levels]
    figure = style.blank()
    axes = figure.subplots()
    colour = style.LINES[0]
    for inner, (label, strength) in enumerate((("all clients", 0.13), ("10 to 90 %", 0.2), ("middle half", 0.3))):
        low, high = levels[:, inner], levels[:, -1 - inner]
        axes.fill_between(rounds, low, high, color=colour, alpha=strength, lw=0, label=label)
    axes.plot(rounds, levels[:, 3], color=colour, label="median")
    axes.set(xlabel="round", ylabel=axis)
    style.whole_numbers(axes.xaxis)
    style.legend(figure, axes)
    caption = (
        "Spread over clients in each round: the line is the median, the bands hold half, four fifths and all of the "
        f"clients. A narrow band means that clients are served alike; {better} is better."
    )
    return Figure(name=f"spread_{kind}", title=f"{title} over rounds", caption=caption, figure=figure)


def _last(group: Group, kind: str) -> np.ndarray:
    parts = [found[max(found)] for run in group.runs if (found := client_values(run, kind))]
    return np.concatenate(parts) if parts else np.empty(0)
