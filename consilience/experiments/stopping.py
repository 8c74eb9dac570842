"""Best model by a validation metric, and early stopping: a function of the rows recorded so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from consilience.core.federation import Rows
from consilience.core.metrics import MetricRow, Metrics
from consilience.core.settings import Checked, Count, Invalid, NonNegative, OnlyWith, Range, nearest
from consilience.core.task import Task
from consilience.core.tree import Tree, leaves

PREFIX = "validation_"
WITH_ROWS = OnlyWith("share")


@dataclass(frozen=True, kw_only=True)
class Validation(Checked):
    """Validation rows, which select the model: `share` of each client's training rows, not trained on; None: none.

    After every `every` rounds (1) the global model is tested on them. It is the best so far if its `metric` (the main
    one) is better than the best before by more than `min_delta` (0). After `patience` such tests in a row without a new
    best the run stops. `export`: which model the run ends with, the "best" (the default) or the "last".
    """

    share: Annotated[float, Range(above=0, below=1)] | None = None
    every: Annotated[Count | None, WITH_ROWS] = None
    metric: Annotated[str | None, WITH_ROWS] = None
    patience: Annotated[Count | None, WITH_ROWS] = None
    min_delta: Annotated[NonNegative | None, WITH_ROWS] = None
    export: Annotated[Literal["best", "last"] | None, WITH_ROWS] = None

    def row(self, metrics: Metrics) -> MetricRow:
        """The validation metric; refused by name if the task does not have it."""
        wanted, known = self.metric or metrics.main, {row.key: row for row in metrics.rows}
        if wanted not in known:
            raise Invalid(
                f"validation.metric = {wanted!r} is not one of {', '.join(known)}{nearest(wanted, known)}: "
                "these are the metrics of this task"
            )
        return known[wanted]


class BestSoFar:
    """The best round by a validation metric, and the number of validations since.

    It depends on the recorded rows only, so that a resumed run stops in the same round as an uninterrupted one.
    """

    def __init__(self, settings: Validation, metric: MetricRow, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self.settings, self.metric = settings, metric
        self.round: int | None = None
        self.value = math.nan
        self.waited = 0
        for row in history:
            self.see(row)

    def see(self, row: Mapping[str, Any]) -> bool:
        """Add a round's row; whether its model is the best so far."""
        key = PREFIX + self.metric.key
        if key not in row:
            return False
        value = row[key]
        if self._is_better(value):
            self.round, self.value, self.waited = int(row["round"]), float(value), 0
            return True
        self.waited += 1
        return False

    @property
    def ends(self) -> bool:
        """Whether patience is exhausted."""
        return self.settings.patience is not None and self.waited >= self.settings.patience

    @property
    def wants_best(self) -> bool:
        """Whether the run ends with the best model instead of the last."""
        return self.settings.export != "last"

    @property
    def facts(self) -> dict[str, Any]:
        """For the record of a run."""
        return {"round": self.round, "metric": self.metric.key, "value": self.value if self.round else None}

    def _is_better(self, value: Any) -> bool:
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        if self.round is None:
            return True
        gain = value - self.value if self.metric.better == "higher" else self.value - value
        return bool(gain > (self.settings.min_delta or 0.0))


def placed(rows: Rows | None, model: Tree) -> Rows | None:
    """Validation rows on the device, and in the floating type, of a model."""
    if rows is None:
        return None
    first = next(leaves(model["params"]))
    return rows.to(first.device, first.dtype)


def best_so_far(settings: Validation, task: Task, history: Iterable[Mapping[str, Any]] = ()) -> BestSoFar | None:
    """The tracker of a run's validation, with its history so far; None without validation."""
    return None if settings.share is None else BestSoFar(settings, settings.row(task.metrics), history)
