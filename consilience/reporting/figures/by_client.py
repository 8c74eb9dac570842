"""Axes of clients and classes, and bars per client, for reports and diagnoses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from consilience.reporting.charts import CLIENT, Axis, Bars, Series

MOST_CLASSES_NAMED = 16
MOST_BARS = 1000


def clients(names: Sequence[str]) -> Axis:
    """An axis of clients: by name, unless the names are mere numbers."""
    told = any(name != str(k) for k, name in enumerate(names))
    return Axis("client", names if told else (), of=CLIENT)


def classes(names: Sequence[str], count: int) -> Axis:
    """An axis of classes: by name where they are few."""
    return Axis("class", names if len(names) == count <= MOST_CLASSES_NAMED else ())


def bars(values: np.ndarray, *, across: Axis, up: str, line: tuple[str, float] | None = None) -> Bars:
    """A bar per client that has a value; `line` marks a reference value.

    Of very many clients, evenly spaced ones are drawn, sorted by their values.
    """
    if len(values) > MOST_BARS:
        across = Axis(f"{len(values):,} clients, largest first: every {len(values) // MOST_BARS:,}th")
        known = np.sort(np.where(np.isfinite(values), values, 0.0))[::-1]
        values = known[np.linspace(0, len(known) - 1, MOST_BARS).astype(np.int64)]
    series = Series(x=np.arange(len(values)), y=values)
    return Bars(series=[series], x=across._replace(unit="whole"), y=Axis(up), level=line)
