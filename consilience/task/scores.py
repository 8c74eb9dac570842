"""Test results: a model's metrics on test rows, overall and per client, and their spread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.metrics import MetricRow
from consilience.core.refusal import Refusal


@dataclass(frozen=True, eq=False, kw_only=True)
class ClientScores:
    """[K] of every client: its loss and its value of the main metric; NaN where a client has no test rows."""

    main: MetricRow
    loss: np.ndarray
    values: np.ndarray
    refusals: tuple[Refusal, ...] = ()  # clients whose sums could not be true
    sampled_from: int | None = None  # clients that have test rows, where only some of them were tested

    @staticmethod
    def none(main: MetricRow) -> ClientScores:
        """No client was tested."""
        return ClientScores(main=main, loss=np.empty(0), values=np.empty(0))

    def spread(self) -> dict[str, float | None]:
        """Mean, median, worst tenth and spread of the main metric over the clients that have test rows.

        The worst tenth is the mean of the worst 10 % of clients, at least one. The median is the most robust to a
        client that reports false values.
        """
        known = np.sort(self.values[np.isfinite(self.values)])
        if not len(known):
            return {"mean": None, "median": None, "worst_tenth": None, "spread": None}
        count = max(1, len(known) // 10)
        worst = known[:count] if self.main.better == "higher" else known[-count:]
        return {
            "mean": float(known.mean()),
            "median": float(np.median(known)),
            "worst_tenth": float(worst.mean()),
            "spread": float(known.std()),
        }

    def mean_loss(self) -> float | None:
        """The mean loss over the clients that have one."""
        known = self.loss[np.isfinite(self.loss)]
        return float(known.mean()) if len(known) else None

    def recorded(self, whose: str) -> dict[str, float | None]:
        """Fields of a record: 'personal_loss', 'personal_accuracy_mean' ..."""
        named = {f"{whose}_{self.main.key}_{name}": value for name, value in self.spread().items()}
        return {f"{whose}_loss": self.mean_loss(), **named, **self.sample(whose)}

    def sample(self, whose: str) -> dict[str, float | None]:
        """For a sample: how many of how many clients were tested, and the standard error of their mean; else empty."""
        if self.sampled_from is None:
            return {}
        known = self.values[np.isfinite(self.values)]
        error = None
        if len(known) > 1:  # without replacement, from finitely many
            error = float(known.std(ddof=1) * np.sqrt((1 - len(known) / self.sampled_from) / len(known)))
        counts = {f"{whose}_clients_tested": len(known), f"{whose}_clients_total": self.sampled_from}
        return {**counts, f"{whose}_{self.main.key}_standard_error": error}


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """Metrics of a model on test rows, overall and per client."""

    rows: int
    metrics: tuple[MetricRow, ...]
    values: dict[str, float | None]
    client_rows: np.ndarray  # [K] test rows of each client
    clients: ClientScores

    def __getitem__(self, key: str) -> float | None:
        return self.values[key]
