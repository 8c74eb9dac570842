"""Aggregation weights: client x round, and learned schedules."""

from __future__ import annotations

import numpy as np

from consilience.reporting import charts
from consilience.reporting.charts import CLIENT, Axis, Figure, Heat, Lines, Scale, Series
from consilience.reporting.figures.by_client import clients
from consilience.reporting.runs import RunData

_MOST_LINES = 12


def table(run: RunData) -> np.ndarray:
    """[clients, rounds] aggregation weights; NaN for clients that did not participate."""
    found = np.full((run.count, len(run.rows)), np.nan)
    for column, row in enumerate(run.rows):
        cohort, weights = row.get("cohort") or [], row.get("weights") or []
        if len(cohort) == len(weights):
            found[np.array(cohort, dtype=np.int64), column] = [np.nan if w is None else w for w in weights]
    return found


def over_rounds(run: RunData) -> list[Figure]:
    """The heat map of weights."""
    weights = table(run)
    if not np.isfinite(weights).any():
        return []
    chart = Heat(
        values=weights,
        down=clients(run.client_names()),
        across=Axis("round", first=1),
        scale=Scale("aggregation weight", low=min(0.0, float(np.nanmin(weights)))),
    )
    caption = (
        "Each row is one client, each column one round; the colour is the client's share in the aggregated update, and "
        "empty means that it took no part. Even colours mean that clients count alike; a bright row is a client that "
        "dominates the model."
    )
    return [Figure(name="weights", title="Aggregation weights", caption=caption, chart=chart)]


def learned(run: RunData) -> list[Figure]:
    """The schedule of a run that follows one (deep unfolding), client by client."""
    options = run.config.get("algorithm", {})
    weighting = options.get("weighting", {}) if isinstance(options, dict) else {}
    name = weighting.get("name") if isinstance(weighting, dict) else weighting
    if not (run.algorithm.startswith("duw") or name == "schedule") or not run.rows:
        return []
    weights, names = table(run), run.client_names()
    if not np.isfinite(weights).any():
        return []
    rounds, few = np.arange(1, weights.shape[1] + 1), len(weights) <= _MOST_LINES
    series = [
        Series(
            name=f"client {name}" if few else "",
            x=rounds,
            y=values,
            look=client if few else 0,
            form="line" if few else "faint",
            link=charts.link(CLIENT, name),
        )
        for client, (name, values) in enumerate(zip(names, weights))
    ]
    ends = rounds[[0, -1]]
    series.append(Series(name="equal weights", x=ends, y=[1 / len(weights)] * 2, form="level"))
    chart = Lines(series=series, x=Axis("round", unit="whole"), y=Axis("aggregation weight"))
    caption = (
        "Aggregation weight of each client in each round, as the learned schedule gave it; dotted: equal weights. "
        "Curves that leave the dotted line are clients that the schedule trusts more or less than the others."
    )
    return [Figure(name="learned_weights", title="Learned weights (DUW)", caption=caption, chart=chart)]
