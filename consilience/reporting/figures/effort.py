"""Cost of rounds, and missing replies."""

from __future__ import annotations

import numpy as np

from consilience.reporting.charts import Axis, Band, Bars, Figure, Lines, Series
from consilience.reporting.runs import RunData

_ROUNDS = Axis("round", unit="whole")
_MISSING = {
    "silent": "silent",
    "late": "late",
    "nonfinite": "not finite",
    "empty_client": "without rows",
    "worker_lost": "worker lost",
}


def over_rounds(run: RunData) -> list[Figure]:
    """Seconds per round, unused replies, and staleness."""
    pictures = [_seconds(run), _missing(run), _staleness(run)]
    return [picture for picture in pictures if picture is not None]


def _seconds(run: RunData) -> Figure | None:
    rounds = np.array([number for number in sorted(run.timing) if number <= len(run.rows)])
    if not len(rounds):
        return None
    spent = {
        name: np.array([float(run.timing[int(number)].get(key) or 0) for number in rounds])
        for name, key in (("training", "seconds"), ("testing", "evaluation_seconds"))
    }
    series = [Series(name=name, x=rounds, y=own, look=number) for number, (name, own) in enumerate(spent.items())]
    chart = Bars(series=series, x=_ROUNDS, y=Axis("wall-clock time (s)"))
    total = sum(float(own.sum()) for own in spent.values())
    caption = (
        f"Wall-clock time of each round, {total:.1f} s in all. The first round may be higher: it includes "
        "preparation and the choice of a lane; later bars should be even."
    )
    return Figure(name="seconds", title="Time per round", caption=caption, chart=chart)


def _missing(run: RunData) -> Figure | None:
    known = {name: run.curve(key) for key, name in _MISSING.items()} | {"refused": _refused(run)}
    known = {name: curve for name, curve in known.items() if curve[1].sum() > 0}
    if not known:
        return None
    series = [Series(name=name, x=x, y=y, look=number) for number, (name, (x, y)) in enumerate(known.items())]
    chart = Bars(series=series, x=_ROUNDS, y=Axis("replies not used", unit="whole"))
    caption = (
        "Replies of selected clients that were not aggregated, by reason. Fewer is better: a round with many of them "
        "learns from few clients; replies that are not finite point to a learning rate that is too large."
    )
    return Figure(name="missing", title="Missing replies", caption=caption, chart=chart)


def _refused(run: RunData) -> tuple[np.ndarray, np.ndarray]:
    """(rounds, replies refused for reasons other than NaN and infinities, which are counted separately)."""
    reasons = {row["round"]: row["rejected"] for row in run.rows if isinstance(row.get("rejected"), dict)}
    counts = [sum(n for why, n in found.items() if why != "nonfinite") for found in reasons.values()]
    return np.array(list(reasons), dtype=np.int64), np.array(counts, dtype=np.float64)


def _staleness(run: RunData) -> Figure | None:
    ages = {row["round"]: row["staleness"] for row in run.rows if row.get("staleness")}
    if not ages:
        return None
    rounds = np.array(sorted(ages))
    band = Band([min(ages[n]) for n in rounds], [max(ages[n]) for n in rounds], "least to most")
    mean = Series(name="mean", x=rounds, y=[float(np.mean(ages[n])) for n in rounds], bands=(band,))
    chart = Lines(series=[mean], x=_ROUNDS, y=Axis("staleness (rounds)"))
    caption = (
        "Rounds that passed between sending a client its model and its reply: mean, and the band from the least to the "
        "most stale reply of the round. Near 0 is best; a wide band means that slow clients train on old models."
    )
    return Figure(name="staleness", title="Staleness", caption=caption, chart=chart)
