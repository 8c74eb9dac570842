"""One finished round and its record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from consilience.core.metrics import MetricRow
from consilience.core.rounds import Round


@dataclass(frozen=True, eq=False, kw_only=True)
class Observation:
    """One finished round and its rows for the record."""

    round: Round
    row: dict[str, Any]  # a function of the run's settings alone
    timing: dict[str, Any]  # wall-clock times
    traffic: tuple[int, int]  # bytes up and down since the first round
    clients: dict[str, Any]  # client by client, a function of the settings as well
    metrics: tuple[MetricRow, ...] = ()  # description of the row's metrics
    is_best: bool = False  # the model is the best so far on the validation rows
