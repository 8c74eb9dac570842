"""A run's numbers in words."""

from __future__ import annotations

_NAMES = {"accuracy": "accuracy", "absolute_error": "error", "loss": "loss", "train_loss": "train loss"}


def quality(row: dict[str, float | None]) -> str:
    """'accuracy 0.9123  loss 0.2871': what was measured this round, else the training loss."""
    known = {name: value for key, name in _NAMES.items() if isinstance(value := row.get(key), float)}
    if "loss" in known:
        known.pop("train loss", None)
    return "  ".join(f"{name} {value:.4f}" for name, value in known.items()) or "no usable reply"


def rate(clients_per_second: float | None) -> str:
    """'512 clients/s', with the digits that matter."""
    value = clients_per_second or 0.0
    return f"{value:,.0f} clients/s" if value >= 10 else f"{value:.2g} clients/s"


def duration(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
