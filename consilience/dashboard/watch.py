"""All runs below a folder: searched at most once a second, read within a budget, changes numbered by version."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from consilience.dashboard.growing_log import Budget
from consilience.dashboard.watched_run import WatchedRun
from consilience.reporting.runs import folders
from consilience.runs import control
from consilience.runs.metric_table import Column, columns, merged

BYTES_A_REQUEST = 1 << 25
SECONDS_A_REQUEST = 0.4
_LOOK_EVERY = 1.0  # seconds
_MOST_DIFFERING = 30  # settings
MOST_COMPARED = 40  # runs


class Watch:
    """The runs by their path below the root; no path is built from a request."""

    def __init__(self, root: Path, *, controlled: bool = False) -> None:
        self.root, self.controlled = Path(root), controlled
        self._runs: dict[str, WatchedRun] = {}
        self._version = 0
        self._members = 0  # the version in which runs were last added or removed
        self._differing: list[str] = []
        self._looked = -_LOOK_EVERY
        self._lock = threading.RLock()

    def known(self) -> dict[str, Path]:
        """Every run below the root, by its relative path."""
        if not self.root.is_dir():
            return {}
        return {path.relative_to(self.root).as_posix(): path for path in folders(self.root) if path != self.root}

    def refresh(self) -> None:
        """Look for runs and read what is new; at most once a second, however many requests there are."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < _LOOK_EVERY:
                return
            control.reap()
            known, version, budget = self.known(), self._version + 1, Budget(BYTES_A_REQUEST, SECONDS_A_REQUEST)
            if set(known) != set(self._runs):
                self._members = version
                self._runs = {name: self._runs.get(name) or WatchedRun(name, path) for name, path in known.items()}
            # running ones first, then those read least, so that a spent budget never skips the same run forever
            order = sorted(self._runs.values(), key=lambda run: (not run.is_going, run.version > 0))
            changed = [run for run in order if run.refresh(budget, version)]
            if changed or self._members == version:
                self._version = version
                self._find_differing(version)
            if any(run.is_behind for run in order):
                now -= _LOOK_EVERY  # there is more to read: the next request continues at once
            self._looked = now

    def overview(self, since: int = 0) -> dict[str, Any]:
        """What changed after a version, all of it at first."""
        self.refresh()
        with self._lock:
            runs = [run for run in self._runs.values() if run.version > since or run.version == 0 == since]
            found: dict[str, Any] = {
                "version": self._version,
                "control": self.controlled,
                "reading": any(run.is_behind for run in self._runs.values()),
                "differing": self._differing,
                "runs": [
                    run.summary(controlled=self.controlled)
                    | {"settings": {key: run.settings[key] for key in self._differing if key in run.settings}}
                    for run in runs
                ],
            }
            if since < self._members:
                found["names"] = list(self._runs)
            return found

    def curves(self, names: Iterable[str], points: int) -> dict[str, Any]:
        """The curves of some runs, with captions; names of other things are left out."""
        self.refresh()
        with self._lock:
            runs = self.chosen(names)
            metrics = merged(run.metrics for run in runs)
            table = sorted(columns(metrics), key=lambda c: c.key not in {row.key for row in metrics if row.main})
            return {
                "version": max((run.version for run in runs), default=0),
                "runs": {
                    run.name: {
                        "status": run.status,
                        "going": run.is_going,
                        "round": run.rounds,
                        "curves": {key: series.points(points) for key, series in run.curves.by_key.items()},
                    }
                    for run in runs
                },
                "columns": [
                    {
                        "key": c.key,
                        "title": c.heading or c.title[:1].upper() + c.title[1:],
                        "axis": c.axis or c.title,
                        "caption": _caption(c),
                        "better": c.better,
                        "detail": not c.has_figure,
                    }
                    for c in table
                    if any(c.key in run.curves.by_key for run in runs)
                ],
            }

    def chosen(self, names: Iterable[str]) -> list[WatchedRun]:
        """The runs of these names, and of folders with these names, each once."""
        self.refresh()
        with self._lock:
            found: dict[str, WatchedRun] = {}
            for name in names:
                if name in self._runs:
                    found[name] = self._runs[name]
                else:
                    found |= {key: run for key, run in self._runs.items() if not name or key.startswith(f"{name}/")}
            return list(found.values())[:MOST_COMPARED]

    def one(self, name: str) -> WatchedRun | None:
        """The run of exactly this name."""
        self.refresh()
        with self._lock:
            return self._runs.get(name)

    def looked_at(self) -> None:
        """Read again with the next request: a run was stopped or resumed, or has just begun."""
        with self._lock:
            self._looked = -_LOOK_EVERY

    def _find_differing(self, version: int) -> None:
        """Find the settings by which the runs differ; if these have changed, all runs get the new version."""
        values: dict[str, set[str]] = {}
        for run in self._runs.values():
            for key, value in run.settings.items():
                values.setdefault(key, set()).add(value)
        found = sorted(key for key, some in values.items() if len(some) > 1)[:_MOST_DIFFERING]
        if found != self._differing:
            self._differing = found
            for run in self._runs.values():
                run.version = version


def _caption(column: Column) -> str:
    """What is drawn, and whether higher or lower is better."""
    better = f"{column.better.capitalize()} is better." if column.better else ""
    return " ".join(text for text in (column.caption, better) if text)
