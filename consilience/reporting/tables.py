"""The numbers under the figures: what each group ended with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from consilience.core.metrics import MetricRow
from consilience.reporting.groups import Group, metrics_of
from consilience.reporting.runs import RunData
from consilience.reporting.terminal import size
from consilience.runs.metric_table import by_importance, columns, merged
from consilience.runs.text import took


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text cells of a table; the first column names the row, those in `words` hold sentences."""

    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    words: frozenset[int] = frozenset()


def final_numbers(groups: Sequence[Group]) -> Table:
    """One line per group: mean and, over several seeds, deviation of the last values; and the best main metric."""
    metrics = metrics_of(groups)
    found: dict[str, Callable[[Group], np.ndarray]] = {}
    for column in columns(by_importance(metrics)):
        if column.role == "training" or column.detail or not any(len(group.final(column.key)) for group in groups):
            continue
        found[_free(column.title, found)] = partial(Group.final, key=column.key)
        row = next((row for row in metrics if row.main and row.key == column.key), None)
        if row is not None and row.key != "loss":
            found[_free("best", found)] = partial(_bests, row=row)
    lines = []
    for group in groups:
        first = (group.label, str(len(group.runs)), _span([len(run.rows) for run in group.runs]))
        lines.append((*first, *(spread(values(group)) for values in found.values())))
    return Table(head=("method", "runs", "rounds", *found), lines=tuple(lines))


def further_numbers(groups: Sequence[Group]) -> Table | None:
    """One line per metric that overviews leave out: what each group ended with; None where there are none."""
    rows = [row for row in by_importance(metrics_of(groups)) if row.detail]
    known = [row for row in rows if any(len(group.final(row.key)) for group in groups)]
    lines = [(row.title, *(spread(group.final(row.key)) for group in groups)) for row in known]
    return Table(head=("metric", *(group.label for group in groups)), lines=tuple(lines)) if lines else None


def _free(title: str, taken: Collection[str]) -> str:
    """The title, numbered where several kinds of task have columns of the same name."""
    numbered = (f"{title} {number}" if number > 1 else title for number in range(1, len(taken) + 2))
    return next(name for name in numbered if name not in taken)


def costs(groups: Sequence[Group]) -> Table:
    """One line per group: mean traffic and time of its runs."""
    virtual = any(_virtual(group) is not None for group in groups)
    head = ["cost", "sent up", "sent down", "wall time", *(["virtual time"] if virtual else []), "final drift"]
    lines = []
    for group in groups:
        cells = [group.label]
        cells += [_mean(group, _sent("up"), size), _mean(group, _sent("down"), size), _mean(group, _wall, took)]
        cells += [_mean(group, lambda run: run.last("simulated_seconds"), took)] if virtual else []
        lines.append((*cells, spread(group.final("drift_relative"))))
    return Table(head=tuple(head), lines=tuple(lines))


def each_run(runs: Sequence[RunData]) -> Table:
    """One line per run."""
    metrics = [row for row in by_importance(merged(run.metrics for run in runs)) if row.main or row.key == "loss"]
    shown = {row.key: row.title for row in metrics if any(run.last(row.key) is not None for run in runs)}
    head = ("run", "algorithm", "data", "seed", "status", "rounds", *shown.values())
    lines = [
        (
            *(run.name, run.algorithm, run.data, str(run.seed), run.status),
            f"{len(run.rows)} of {run.config.get('rounds', '?')}",
            *(number(run.last(key)) for key in shown),
        )
        for run in runs
    ]
    return Table(head=head, lines=tuple(lines))


def spread(values: np.ndarray) -> str:
    """0.9123, or 0.9123 ± 0.0041 over several runs (standard deviation)."""
    if not len(values):
        return "-"
    if len(values) == 1:
        return number(float(values[0]))
    return f"{number(float(values.mean()))} ± {number(float(values.std(ddof=1)))}"


def number(value: float | None) -> str:
    """Four digits behind the point; - for none."""
    if value is None or not np.isfinite(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.3g}"


def _bests(group: Group, row: MetricRow) -> np.ndarray:
    curves = [run.curve(row.key)[1] for run in group.runs]
    return np.array([values.max() if row.better == "higher" else values.min() for values in curves if len(values)])


def _sent(way: str) -> Callable[[RunData], float | None]:
    return lambda run: run.last(f"bytes_{way}_total")


def _wall(run: RunData) -> float | None:
    _, seconds = run.seconds()
    return float(seconds[-1]) if len(seconds) else None


def _virtual(group: Group) -> float | None:
    return next((value for run in group.runs if (value := run.last("simulated_seconds"))), None)


def _mean(group: Group, of: Callable[[RunData], float | None], shown: Callable[[float], str]) -> str:
    known = [value for run in group.runs if (value := of(run)) is not None]
    return shown(float(np.mean(known))) if known else "-"


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
