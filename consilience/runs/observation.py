"""One finished round, with what is recorded of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from consilience.core.metrics import MetricRow
from consilience.core.rounds import Round
from consilience.runs.text import quality


@dataclass(frozen=True, eq=False, kw_only=True)
class Observation:
    """One finished round and what is to be recorded of it."""

    round: Round
    row: dict[str, Any]  # a function of the run's settings alone
    timing: dict[str, Any]  # wall-clock times
    traffic: tuple[int, int]  # bytes up and down since the first round
    clients: dict[str, Any]  # client by client, a function of the settings as well
    metrics: tuple[MetricRow, ...] = ()  # what the row's metrics are
    is_best: bool = False  # the model is the best so far on the validation rows

    def quality(self) -> str:
        """How good the model is, in words."""
        return quality(self.row, self.metrics)
