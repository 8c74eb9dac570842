"""Formats a run's numbers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from consilience.core.metrics import MetricRow
from consilience.runs.names import plain


def quality(row: Mapping[str, Any], metrics: Sequence[MetricRow]) -> str:
    """'accuracy 0.9123  loss 0.2871': the main metric and the loss of this round, else the training loss."""
    shown = {metric.key: metric.title for metric in metrics if metric.main}
    shown |= {metric.key: metric.title for metric in metrics if metric.key == "loss"}
    if not isinstance(row.get("loss"), float):
        shown["train_loss"] = "train loss"
    known = [f"{title} {row[key]:.4f}" for key, title in shown.items() if isinstance(row.get(key), float)]
    return "  ".join(known) or "no usable reply"


def rate(clients_per_second: float | None) -> str:
    """'512 clients/s', rounded."""
    value = clients_per_second or 0.0
    return f"{value:,.0f} clients/s" if value >= 10 else f"{value:.2g} clients/s"


def duration(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def took(seconds: float) -> str:
    """'0.42 s' below ten seconds, else 2:03."""
    return f"{seconds:.2g} s" if seconds < 9.95 else duration(seconds)


def best_model(facts: Mapping[str, Any]) -> str:
    """The best round on the validation rows, and whether the run stopped early."""
    best, early = facts.get("best"), facts.get("stopped_early")
    if not isinstance(best, dict) or not isinstance(best.get("value"), float):
        return ""
    found = f"best on validation rows: round {best['round']}, {plain(str(best['metric']))} {best['value']:.4f}"
    return found + (f"; stopped early after round {early}" if early else "")
