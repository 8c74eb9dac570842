"""Groups of runs that differ only in their seed: one curve with a band, one line of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from consilience.core.metrics import MetricRow
from consilience.reporting.runs import RunData
from consilience.runs.metric_table import merged
from consilience.runs.names import plain

ASIDE = ("name", "seed", "rounds", "threads", "engine", "checkpoint", "log", "label")
"""Settings by which runs of one group may differ; none of them defines a method."""

_MISSING = "default"
_LONGEST = 42  # characters of a label: what fits below a figure


@dataclass(frozen=True, eq=False, kw_only=True)
class Group:
    """Runs with the same settings except the seed; `label` says how they differ from the other groups."""

    label: str
    runs: tuple[RunData, ...]  # by seed

    @property
    def first(self) -> RunData:
        """The run whose details are shown: of those with the most rounds, the one with the lowest seed."""
        furthest = max(len(run.rows) for run in self.runs)
        return next(run for run in self.runs if len(run.rows) == furthest)

    def band(self, key: str) -> Band:
        """A metric over rounds: mean, lowest and highest in rounds that all runs have, and each run's own curve."""
        curves = [curve for run in self.runs if len((curve := run.curve(key))[0])]
        if not curves:
            nothing = np.empty(0)
            return Band(rounds=nothing, mean=nothing, low=nothing, high=nothing, curves=())
        common = curves[0][0]
        for rounds, _ in curves[1:]:
            common = np.intersect1d(common, rounds)
        values = np.stack([value[np.isin(rounds, common)] for rounds, value in curves])  # [runs, common rounds]
        low, high = values.min(0), values.max(0)
        return Band(rounds=common, mean=values.mean(0), low=low, high=high, curves=tuple(curves))

    def final(self, key: str) -> np.ndarray:
        """The last value of each run that has one."""
        return np.array([value for run in self.runs if (value := run.last(key)) is not None])


@dataclass(frozen=True, eq=False, kw_only=True)
class Band:
    """One metric of a group."""

    rounds: np.ndarray  # those that all its runs have
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    curves: tuple[tuple[np.ndarray, np.ndarray], ...]  # (rounds, values) of each run


def grouped(runs: Sequence[RunData]) -> list[Group]:
    """The groups in order of their first run, with distinct labels."""
    members: dict[str, list[RunData]] = {}
    for run in runs:
        members.setdefault(json.dumps([run.label, _settings(run)], sort_keys=True), []).append(run)
    labels = _labels([group[0] for group in members.values()])
    return [
        Group(label=label, runs=tuple(sorted(group, key=lambda run: (run.seed, run.name))))
        for label, group in zip(labels, members.values())
    ]


def metrics_of(groups: Sequence[Group]) -> tuple[MetricRow, ...]:
    """The metrics of all runs."""
    return merged(run.metrics for group in groups for run in group.runs)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'algorithm.lr': 0.2, ...}."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        found |= inner
    return found


def _settings(run: RunData) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in ASIDE}


def _labels(runs: Sequence[RunData]) -> list[str]:
    """Labels of a comparison's methods; else the algorithm and the differing settings; if too long, the run's name."""
    given = [run.label for run in runs]
    if all(given) and len(set(given)) == len(given):
        return [_cut(label) for label in given]
    if len(runs) == 1:
        return [_cut(f"{runs[0].algorithm} on {runs[0].data}")]
    labels = _told_apart(runs, strict=False)
    if len(set(labels)) < len(labels):
        labels = _told_apart(runs, strict=True)
    named = [f"{run.algorithm} ({run.name})" for run in runs]
    fit = [len(label) <= _LONGEST and labels.count(label) == 1 for label in labels]
    return [_cut(label if good else name) for label, name, good in zip(labels, named, fit)]


def _told_apart(runs: Sequence[RunData], *, strict: bool) -> list[str]:
    """The algorithm and the settings that differ; unless `strict`, missing settings are not compared.

    Runs of an older version lack settings that were added later.
    """
    settings = [flat(_settings(run)) for run in runs]
    keys = sorted({key for one in settings for key in one} - {"algorithm.name"})
    labels = []
    for run, own in zip(runs, settings):
        # options are compared among runs of the same algorithm, other sections among all runs
        alike = [other for other, it in zip(settings, runs) if it.algorithm == run.algorithm]
        telling = [k for k in keys if _differs(k, alike if k.startswith("algorithm.") else settings, strict)]
        words = [f"{_short(key)}={_word(own.get(key, _MISSING))}" for key in telling if strict or key in own]
        labels.append(" ".join([run.algorithm, *words]))
    return labels


def _differs(key: str, settings: Sequence[dict[str, Any]], strict: bool) -> bool:
    return len({json.dumps(one.get(key, _MISSING)) for one in settings if strict or key in one}) > 1


def _cut(label: str) -> str:
    label = plain(label, most=200)
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


def _short(key: str) -> str:
    """'mu' for algorithm.mu, 'data' for data.name."""
    section, _, rest = key.partition(".")
    if rest == "name":
        return section
    return rest if section == "algorithm" else key


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
