"""Clients of a run: totals of all, and the history of one; both continue reading where the last request stopped."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Any

import numpy as np

from consilience.dashboard.curves import Series, is_number
from consilience.dashboard.growing_log import Budget, GrowingLog
from consilience.dashboard.nodes import client_rows
from consilience.dashboard.watched_run import WatchedRun
from consilience.reporting.runs import federation_of
from consilience.runs.folder import RunFolder
from consilience.runs.metric_table import main_of
from consilience.runs.names import plain

MOST_LISTED = 2000
_POINTS = 400


class ClientTotals:
    """How often each client answered and was refused, with its last known values."""

    def __init__(self, run: WatchedRun) -> None:
        self._run = run
        self._facts, _ = federation_of(RunFolder.open(run.path))
        self._main = main_of(run.metrics).key if run.metrics else ""
        self._begin()

    def _begin(self) -> None:
        self._metrics = GrowingLog(self._run.path / "metrics.jsonl", with_lists=True)
        self._own = GrowingLog(self._run.path / "clients.jsonl", with_lists=True)
        self._answered, self._refused = np.zeros(0, np.int64), Counter[int]()
        self._weights: dict[int, float] = {}
        self._scores: dict[str, list[float | None]] = {}

    def read(self, budget: Budget) -> None:
        """What is new, within the budget."""
        anew, rows = self._metrics.read(budget)
        again, own = self._own.read(budget)
        if anew or again:  # a resumed run truncated its log
            self._begin()
            (_, rows), (_, own) = self._metrics.read(budget), self._own.read(budget)
        for row in rows:
            ids = _ids(row)
            if ids:
                if ids[-1] >= len(self._answered):
                    self._answered = np.pad(self._answered, (0, ids[-1] + 1 - len(self._answered)))
                self._answered[ids] += 1
                if isinstance(row.get("weights"), list) and len(row["weights"]) == len(ids):
                    self._weights.update(zip(ids, row["weights"]))
        for row in own:
            self._refused.update(who for _, who in _refusals(row))
            for key in (self._main, f"personal_{self._main}"):
                if isinstance(row.get(key), list):
                    self._scores[key] = row[key]

    def table(self) -> dict[str, Any]:
        """One row per client, and whether there is more to read."""
        names, facts = self._facts.get("names") or [], self._facts
        count = max(len(names), len(self._answered), int(self._run.facts.get("clients") or 0))
        columns: dict[str, Any] = {
            "rows": facts.get("train_rows") or client_rows(self._run.path),
            "answered": np.pad(self._answered, (0, count - len(self._answered))).tolist(),
            "value": self._scores.get(self._main),
            "personal": self._scores.get(f"personal_{self._main}"),
        }
        listed = [
            {
                "client": k,
                "name": plain(names[k], most=40) if k < len(names) else str(k),
                "weight": _finite(self._weights.get(k)),
                "refused": self._refused.get(k, 0),
                **{key: _finite(_at(values, k)) for key, values in columns.items()},
            }
            for k in range(min(count, MOST_LISTED))
        ]
        behind = self._metrics.behind + self._own.behind
        return {"clients": listed, "count": count, "main": self._main, "reading": behind > 0}


class ClientHistory:
    """One client over rounds: weight, drift, training loss, scores and refused replies."""

    def __init__(self, run: WatchedRun, client: int) -> None:
        self.client, self._run = client, run
        self._facts, _ = federation_of(RunFolder.open(run.path))
        self._main = main_of(run.metrics).key if run.metrics else ""
        self._begin()

    def _begin(self) -> None:
        self._metrics = GrowingLog(self._run.path / "metrics.jsonl", with_lists=True)
        self._own = GrowingLog(self._run.path / "clients.jsonl", with_lists=True)
        self._series: dict[str, Series] = {}
        self._cohorts: dict[int, int] = {}  # round -> this client's place in it, until the clients' row is read
        self._refusals: list[tuple[int, str]] = []
        self._answered = 0

    def read(self, budget: Budget) -> None:
        """What is new, within the budget."""
        anew, rows = self._metrics.read(budget)
        if anew:
            self._begin()
            _, rows = self._metrics.read(budget)
        for row in rows:
            ids = _ids(row)
            place = bisect_left(ids, self.client)
            if place < len(ids) and ids[place] == self.client:
                self._answered += 1
                self._cohorts[row["round"]] = place
                self._add("weight", row["round"], _at(row.get("weights"), place))
        again, own = self._own.read(budget)
        if again:
            self._begin()
            return
        for row in own:
            for key in (self._main, f"personal_{self._main}"):
                self._add(key, row["round"], _at(row.get(key), self.client))
            place_ = self._cohorts.pop(row["round"], None)
            if place_ is not None:
                self._add("drift", row["round"], _at(row.get("cohort_drift"), place_))
                self._add("train_loss", row["round"], _at(row.get("cohort_loss"), place_))
            self._refusals += [(row["round"], why) for why, who in _refusals(row) if who == self.client]
            del self._refusals[:-_POINTS]

    def facts(self) -> dict[str, Any]:
        """Everything known about the client."""
        facts, k = self._facts, self.client
        counts = _at(facts.get("class_counts"), k)
        labels = facts.get("labels") or []
        held = [
            {"label": plain(labels[c], most=40) if c < len(labels) else str(c), "rows": n}
            for c, n in enumerate(counts if isinstance(counts, list) else [])
            if is_number(n)
        ]
        name = _at(facts.get("names"), k)
        return {
            "client": k,
            "name": plain(name, most=80) if name is not None else str(k),
            "rows": _finite(_at(facts.get("train_rows") or client_rows(self._run.path), k)),
            "test_rows": _finite(_at(facts.get("test_rows"), k)),
            "labels": held,
            "answered": self._answered,
            "rounds": self._run.rounds,
            "refusals": [{"round": round, "reason": plain(why, most=60)} for round, why in reversed(self._refusals)],
            "curves": {key: series.points(_POINTS) for key, series in self._series.items()},
            "main": self._main,
            "reading": self._metrics.behind + self._own.behind > 0,
        }

    def _add(self, key: str, round: int, value: Any) -> None:
        if key and is_number(value):
            self._series.setdefault(key, Series(_POINTS)).add(round, float(value))


def _ids(row: dict[str, Any]) -> list[int]:
    """The participating clients, ascending; empty if the record is malformed."""
    found = row.get("cohort")
    if not isinstance(found, list) or not all(type(k) is int and 0 <= k < 10**7 for k in found):
        return []
    return found


def _refusals(row: dict[str, Any]) -> list[tuple[str, int]]:
    """(reason, client) of a clients' row."""
    found = row.get("refused")
    if not isinstance(found, dict):
        return []
    return [(str(why), k) for why, some in found.items() if isinstance(some, list) for k in some if type(k) is int]


def _at(values: Any, place: int) -> Any:
    return values[place] if isinstance(values, list) and place < len(values) else None


def _finite(value: Any) -> Any:
    return value if is_number(value) else None
