"""Fairness: the spread of the main metric over clients, at the end and over rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from consilience.core.metrics import MetricRow
from consilience.reporting import charts
from consilience.reporting.charts import METHOD, Axis, Band, Figure, Heat, Lines, Scale, Series, Strip, Strips
from consilience.reporting.figures.by_client import clients
from consilience.reporting.groups import Group, metrics_of
from consilience.reporting.runs import RunData
from consilience.runs.metric_table import axis_of, by_importance

_LEVELS = (0, 10, 25, 50, 75, 90, 100)


def at_the_end(groups: Sequence[Group]) -> list[Figure]:
    """Every client of every group at its last test: a dot for each, and quartiles."""
    pictures = [_strips(*field, groups) for field in _fields(metrics_of(groups))]
    return [picture for picture in pictures if picture is not None]


def over_rounds(run: RunData) -> list[Figure]:
    """The same for one run over rounds: as nested bands, and client by client."""
    pictures = [draw(*field, run) for field in _fields(run.metrics) for draw in (_bands, _each)]
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
    strips = [_strip(number, group, values, named=len(groups) > 1) for number, group, values in pooled]
    words = ("median", "middle half")
    chart = Strips(strips=strips, x=Axis(axis), spread=True, box=True, words=words)
    seeds = max(len(group.runs) for group in groups)
    caption = "Each dot is one client at the last test; the box holds the middle half, the bar is the median." + (
        " Clients of all seeds are drawn together." if seeds > 1 else ""
    )
    caption += f" Dots close together mean that clients are served alike; {better} is better."
    return Figure(name=f"clients_{kind}", title=title, caption=caption, chart=chart)


def _strip(number: int, group: Group, values: np.ndarray, *, named: bool) -> Strip:
    low, middle, high = (float(level) for level in np.percentile(values, (25, 50, 75)))
    name = group.label if named else ""
    return Strip(name, values, middle, (low, high), look=number, link=charts.link(METHOD, group.label))


def _bands(kind: str, axis: str, title: str, better: str, run: RunData) -> Figure | None:
    found = client_values(run, kind)
    if len(found) < 2:
        return None
    rounds = np.array(sorted(found))
    levels = np.stack([np.percentile(found[number], _LEVELS) for number in rounds])  # [rounds, levels]
    named = (("all clients", 0.13), ("10 to 90 %", 0.2), ("middle half", 0.3))
    bands = tuple(
        Band(levels[:, inner], levels[:, -1 - inner], label, strength) for inner, (label, strength) in enumerate(named)
    )
    median = Series(name="median", x=rounds, y=levels[:, 3], bands=bands)
    chart = Lines(series=[median], x=Axis("round", unit="whole"), y=Axis(axis))
    caption = (
        "Spread over clients in each round: the line is the median, the bands hold half, four fifths and all of the "
        f"clients. A narrow band means that clients are served alike; {better} is better."
    )
    return Figure(name=f"spread_{kind}", title=f"{title} over rounds", caption=caption, chart=chart)


def _each(kind: str, axis: str, title: str, better: str, run: RunData) -> Figure | None:
    """Client x tested round, where the values of all clients were recorded."""
    rows = {n: row[kind] for n, row in run.clients.items() if isinstance(row.get(kind), list) and n <= len(run.rows)}
    rounds = sorted(n for n, values in rows.items() if len(values) == run.count)
    if len(rounds) < 2:
        return None
    values = np.array([[np.nan if v is None else v for v in rows[n]] for n in rounds], dtype=np.float64).T
    if not np.isfinite(values).any():
        return None
    across = Axis("round", [str(n) for n in rounds]) if rounds[-1] != len(rounds) else Axis("round", first=1)
    chart = Heat(values=values, down=clients(run.client_names()), across=across, scale=Scale(axis))
    caption = (
        f"Each row is one client, each column one test; the colour is the client's value on its own test rows, and "
        f"{better} is better. Rows that reach the good end of the scale together mean that clients are served alike; "
        "a row that stays behind is a client for which the model does not work."
    )
    return Figure(name=f"each_{kind}", title=f"{title}, client by client", caption=caption, chart=chart)


def _last(group: Group, kind: str) -> np.ndarray:
    parts = [found[max(found)] for run in group.runs if (found := client_values(run, kind))]
    return np.concatenate(parts) if parts else np.empty(0)
