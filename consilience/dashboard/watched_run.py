"""One run in the dashboard: facts and settings reread when their files change, and the rows read so far."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from consilience.core.metrics import MetricRow
from consilience.dashboard.curves import Curves
from consilience.dashboard.growing_log import Budget, GrowingLog
from consilience.reporting.groups import ASIDE, flat
from consilience.reporting.runs import PLACES
from consilience.reporting.terminal import status
from consilience.runs import control, metric_table
from consilience.runs.folder import CONFIG, RecordError, RunFolder
from consilience.runs.metric_table import main_of
from consilience.runs.names import plain
from consilience.runs.redact import redacted
from consilience.runs.text import duration
from consilience.runs.toml_text import loads

SPARK_POINTS = 40
_MOST_EVENTS = 200
_RECENT = 20  # rounds whose mean duration estimates the time left
_LONGEST = 60  # characters of a setting's value


class WatchedRun:
    """What is known about a run; `refresh` reads what is new, and `version` then changes."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.version = 0
        self.facts: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.settings: dict[str, str] = {}  # settings by which runs may differ, as text
        self.group = ""
        self.problem = ""
        self.status = "not read yet"
        self.metrics: tuple[MetricRow, ...] = ()
        self._stamps: dict[str, tuple[int, int]] = {}
        self._shown: Any = None
        self._begin()

    def _begin(self) -> None:
        self._log, self._timing = GrowingLog(self.path / "metrics.jsonl"), GrowingLog(self.path / "timing.jsonl")
        self.curves, self.rounds, self.refused = Curves(), 0, 0
        self.last: dict[str, Any] = {}
        self.events: list[tuple[int, str]] = []
        self.seconds = 0.0
        self._recent: list[float] = []

    @property
    def is_behind(self) -> bool:
        """Whether there are unread rows."""
        return not self.problem and self._log.behind > 0

    def refresh(self, budget: Budget, version: int) -> bool:
        """Read what is new, within the budget; returns whether there was any, and then sets this version."""
        if budget.is_spent and not self._stamps:
            return False  # a new run is read by the next request
        try:
            self._read_facts()
            self.status = status(self.path, self.facts).partition(" as process")[0]
            self.problem = ""
        except (RecordError, OSError, ValueError) as problem:
            self.problem, self.status = plain(problem, most=400), "damaged"
        if not budget.is_spent:
            self._read_rows(budget)
        shown = (
            self.status,
            self.problem or self._log.problem,
            self.rounds,
            self.seconds,
            self._stamps.get("run.json"),
        )
        if shown == self._shown:
            return False
        self._shown, self.version = shown, version
        return True

    def _read_facts(self) -> None:
        folder = None
        for name in ("run.json", CONFIG):
            found = (self.path / name).stat()
            stamp = (found.st_mtime_ns, found.st_size)
            if self._stamps.get(name) == stamp:
                continue
            folder = folder or RunFolder.open(self.path)
            if name == CONFIG:
                table = redacted(loads(folder.config_text()))
                self.config = {key: value for key, value in table.items() if key not in PLACES}
                kept = {key: value for key, value in self.config.items() if key not in ASIDE}
                self.settings = {key: plain(value, most=_LONGEST) for key, value in flat(kept).items()}
                self.group = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:12]
            else:
                self.facts = redacted(folder.facts())
                self.metrics = metric_table.read(self.facts, [self.last] if self.last else [])
            self._stamps[name] = stamp

    def _read_rows(self, budget: Budget) -> None:
        anew, rows = self._log.read(budget)
        if anew:
            self._begin()
            anew, rows = self._log.read(budget)
        if rows:
            self.curves.add(rows)
            self.rounds, self.last = rows[-1]["round"], rows[-1]
            for row in rows:
                found = row.get("rejected")
                self.refused += sum(n for n in found.values() if type(n) is int) if isinstance(found, dict) else 0
                said = row.get("refused")
                self.events += [(row["round"], plain(text)) for text in said[:20]] if isinstance(said, list) else []
            del self.events[:-_MOST_EVENTS]
            if not isinstance(self.facts.get(metric_table.FACT), list):
                self.metrics = metric_table.read(self.facts, [self.last])
        again, timed = self._timing.read(budget)
        if again:
            self.seconds, self._recent = 0.0, []
        for row in timed:
            spent = sum(float(row.get(key) or 0) for key in ("seconds", "evaluation_seconds"))
            self.seconds += spent
            self._recent = [*self._recent[1 - _RECENT :], spent]

    @property
    def is_going(self) -> bool:
        return self.status.startswith("running")

    @property
    def total(self) -> int | None:
        """The number of rounds in the settings."""
        found = self.config.get("rounds")
        return found if type(found) is int else None

    def summary(self, *, controlled: bool) -> dict[str, Any]:
        """What a list of runs shows."""
        main = main_of(self.metrics) if self.metrics else None
        series = self.curves.by_key.get(main.key) if main else None
        best = None if series is None or main is None else series.high if main.better == "higher" else series.low
        loss = self.curves.by_key.get("loss") or self.curves.by_key.get("train_loss")
        return {
            "name": self.name,
            "folder": self.name.rpartition("/")[0],
            "status": self.status,
            "going": self.is_going,
            "problem": self.problem or self._log.problem,
            "reading": self.is_behind,
            "algorithm": _named(self.config, "algorithm"),
            "data": _named(self.config, "data"),
            "model": _named(self.config, "model"),
            "seed": self.config.get("seed", 0),
            "clients": self.facts.get("clients"),
            "deployed": bool(self.facts.get("deployed")),
            "created": str(self.facts.get("created", "")),
            "group": self.group,
            "round": self.rounds,
            "rounds": self.total,
            "metric": {"key": main.key, "title": main.title, "better": main.better} if main else None,
            "value": series.last if series else None,
            "best": best[0] if best else None,
            "loss": loss.last if loss else None,
            "spark": (series or loss).points(SPARK_POINTS)[1] if (series or loss) else [],  # type: ignore[union-attr]
            "refused": self.refused,
            "seconds": round(self.seconds, 1),
            "left": self.left(),
            "can": self.can() if controlled else "",
        }

    def left(self) -> str:
        """The estimated time left of a run in progress, by its last rounds."""
        if not self.is_going or not self._recent or self.total is None:
            return ""
        return duration(sum(self._recent) / len(self._recent) * max(0, self.total - self.rounds))

    def can(self) -> str:
        """The permitted action: 'stop', 'resume' or ''."""
        with contextlib.suppress(OSError):
            return control.possible(self.path, self.facts)
        return ""

    def age(self) -> float | None:
        """Seconds since the last round was written."""
        with contextlib.suppress(OSError):
            return max(0.0, time.time() - (self.path / "metrics.jsonl").stat().st_mtime)
        return None


def _named(config: dict[str, Any], section: str) -> str:
    found = config.get(section, {})
    return plain(found.get("name", "?") if isinstance(found, dict) else found, most=_LONGEST)
