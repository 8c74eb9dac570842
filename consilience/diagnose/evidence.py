"""Stored comparisons of methods by task: which task is most similar to a federation, and what helped there."""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
from dataclasses import dataclass
from typing import Any

from consilience.diagnose.diagnosis import Diagnosis

FAR = 0.3  # at this distance a task differs in one measure by half of its measured range
_SCALES = {"labels": 0.8, "sizes": 0.6, "inputs": 0.6, "work": 4.0}
"""About the largest value of each measure in the measured tasks, so that all measures have equal weight."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One method on one task: its difference from the baseline, and whether it is significant in the paired tests."""

    method: str
    difference: float  # of a share: 0.01 is a point
    verdict: str

    @property
    def is_better(self) -> bool:
        """Whether it is significantly better than the baseline."""
        return self.verdict.startswith("larger")

    @property
    def is_worse(self) -> bool:
        """Whether it is significantly worse than the baseline."""
        return self.verdict.startswith("smaller")


@dataclass(frozen=True, kw_only=True)
class MeasuredTask:
    """A comparison of methods on one task, and how heterogeneous the task is."""

    task: str
    title: str
    trials: int  # each method was tuned with; 0: options were guessed once
    seeds: list[int]
    baseline: str
    heterogeneity: dict[str, float]
    methods: dict[str, dict[str, Any]]

    def findings(self, metric: str) -> list[Finding]:
        """Every method that was compared by this metric, the furthest ahead first."""
        known = [(name, found[metric]) for name, found in self.methods.items() if metric in found]
        found = [Finding(method=name, difference=value[0], verdict=value[1]) for name, value in known]
        return sorted(found, key=lambda item: (-item.difference, item.method))

    def seconds(self, method: str) -> float | None:
        """Simulated seconds of a run."""
        value = self.methods.get(method, {}).get("simulated_seconds")
        return None if value is None else float(value)

    @property
    def strength(self) -> str:
        """The seeds and tuning behind the numbers, in words."""
        how = f"tuned with {self.trials} trials each" if self.trials else "options not tuned"
        return f"{self.title}; {len(self.seeds)} seeds, {how}"


@functools.cache
def tasks() -> tuple[MeasuredTask, ...]:
    """All measured tasks; see docs/comparison.md and docs/diagnose.md."""
    text = (importlib.resources.files("consilience.diagnose") / "evidence.json").read_text(encoding="utf-8")
    return tuple(MeasuredTask(**task) for task in json.loads(text)["tasks"])


def coordinates(of: Diagnosis) -> dict[str, float]:
    """A federation as a point: labels, inputs beyond chance, sizes, and the logarithm of the unequal work."""
    shift = of.features
    return {
        "labels": round(max(0.0, float(of.labels.mean - of.labels.chance_mean)), 4),
        "sizes": round(float(of.quantity.gini), 4),
        "inputs": round(max(0.0, float(shift.excess)) if shift is not None and shift.is_shown else 0.0, 4),
        "work": round(math.log2(max(1.0, float(of.effort.epochs_ratio))), 4),
    }


def distance(one: dict[str, float], other: dict[str, float]) -> float:
    """Root mean square of the differences, each measure on its scale."""
    squares = [((one[key] - other[key]) / scale) ** 2 for key, scale in _SCALES.items()]
    return math.sqrt(sum(squares) / len(squares))


def nearest(of: Diagnosis) -> tuple[MeasuredTask, float]:
    """The task most similar to a federation, and its distance; among equally near tasks a tuned one."""
    here = coordinates(of)
    found = min(tasks(), key=lambda task: (round(distance(here, task.heterogeneity), 3), not task.trials))
    return found, distance(here, found.heterogeneity)
