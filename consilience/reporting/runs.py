"""A run's data for a report: everything in its folder, read once, without secrets and paths."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from consilience.core.metrics import MetricRow
from consilience.core.settings import Invalid
from consilience.reporting.terminal import status
from consilience.runs import canonical, metric_table
from consilience.runs.disk import read_file
from consilience.runs.folder import RecordError, RunFolder
from consilience.runs.names import plain
from consilience.runs.redact import redacted
from consilience.runs.row_log import RowLog
from consilience.runs.toml_text import loads

Rows = list[dict[str, Any]]
PLACES = ("runs", "data_dir")
"""Settings that are paths: not part of a report."""

_MOST_BYTES = 1 << 24
_DEEPEST = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class RunData:
    """One run: settings, facts and rows; `notes` says what could not be read."""

    name: str
    path: Path
    config: dict[str, Any]
    facts: dict[str, Any]
    status: str
    rows: Rows
    timing: dict[int, dict[str, Any]]  # by round
    clients: dict[int, dict[str, Any]]  # by round; empty for runs of old
    federation: dict[str, Any]
    metrics: tuple[MetricRow, ...] = ()
    label: str = ""  # the label of its method in a comparison
    notes: tuple[str, ...] = field(default=())

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def algorithm(self) -> str:
        return str(_section(self.config, "algorithm").get("name", "?"))

    @property
    def data(self) -> str:
        return str(_section(self.config, "data").get("name", "?"))

    @property
    def count(self) -> int:
        """How many clients there are."""
        named = self.federation.get("names") or []
        seen = [max(row["cohort"], default=-1) + 1 for row in self.rows if row.get("cohort")]
        return max(len(named), int(self.facts.get("clients") or 0), *seen, 0)

    @property
    def is_simulated(self) -> bool:
        """Whether all clients were simulated in one process: then the record exposes no real client."""
        return not self.facts.get("deployed") and _section(self.config, "engine").get("name") != "flower"

    def client_names(self) -> list[str]:
        """One for each client; numbers where they have none."""
        names = [plain(name, most=24) for name in self.federation.get("names") or []]
        return names + [str(k) for k in range(len(names), self.count)]

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(rounds, values) of a metric in the rounds that have it."""
        known = [(row["round"], row[key]) for row in self.rows if _is_number(row.get(key))]
        return np.array([n for n, _ in known], dtype=np.int64), np.array([v for _, v in known], dtype=np.float64)

    def seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """(rounds, wall seconds since the first one began), training and testing; pauses between starts left out."""
        known = [n for n in sorted(self.timing) if n <= len(self.rows)]
        spent = [sum(float(self.timing[n].get(key) or 0) for key in ("seconds", "evaluation_seconds")) for n in known]
        return np.array(known, dtype=np.int64), np.cumsum(spent)

    def last(self, key: str) -> float | None:
        """The last known value of a metric."""
        _, values = self.curve(key)
        return float(values[-1]) if len(values) else None


def find(paths: Iterable[Path], *, tolerant: bool = False) -> tuple[list[RunData], list[str]]:
    """The runs in run folders and in folders of them, in order, each once; and what could not be read.

    A run that was named itself must be readable, unless `tolerant`.
    """
    found: dict[Path, RunData] = {}
    problems: list[str] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"{plain(path, most=400)} is no folder: give run folders, or a folder of them")
        inside = list(folders(path))
        for folder in inside:
            try:
                found.setdefault(folder.resolve(), read(folder))
            except (RecordError, OSError, ValueError) as problem:
                if folder == path and not tolerant:
                    raise
                problems.append(plain(f"{folder.name}: {problem}", most=400))
        if not inside:
            raise Invalid(f"{plain(path, most=400)} holds no run: `consilience run` makes run folders")
    return list(found.values()), problems


def read(path: Path) -> RunData:
    """Read a run folder; damaged parts are left out and noted."""
    folder = RunFolder.open(path)
    facts, history = folder.facts(), folder.rows()
    notes = [history.note] if history.note else []
    config = {key: value for key, value in redacted(loads(folder.config_text())).items() if key not in PLACES}
    timing, more = _by_round(folder.timing)
    clients, other = _by_round(folder.clients)
    federation, last = federation_of(folder)
    return RunData(
        name=folder.name,
        path=path,
        config=config,
        facts=redacted(facts),
        status=status(path, facts).partition(" as process")[0],
        rows=history.rows,
        timing=timing,
        clients=clients,
        federation=federation,
        metrics=metric_table.read(facts, history.rows),
        label=_label(path),
        notes=tuple(plain(note, most=400) for note in [*notes, *more, *other, *last]),
    )


def folders(path: Path, depth: int = 0) -> Iterable[Path]:
    """The run folders in a folder; the folder itself, if it is one."""
    if os.path.lexists(path / "run.json"):  # a broken link is reported, not ignored
        yield path
    elif depth < _DEEPEST:
        for inner in sorted(path.iterdir()):
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                yield from folders(inner, depth + 1)


def _by_round(log: RowLog) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Rows by their round, the last of several; what is damaged is left out and noted."""
    if not log.path.exists():
        return {}, []
    try:
        history = log.read()
    except RecordError as problem:
        return {}, [str(problem)]
    return {row["round"]: row for row in history.rows if isinstance(row.get("round"), int)}, []


def federation_of(folder: RunFolder) -> tuple[dict[str, Any], list[str]]:
    """The description of the clients, as far as it is readable; the problem with it."""
    if not os.path.lexists(folder.federation):
        return {}, []
    try:
        found = canonical.decode(folder.read(folder.federation.name))
    except (RecordError, OSError, ValueError) as problem:
        return {}, [f"{folder.federation.name} cannot be read: {problem}"]
    return (found, []) if isinstance(found, dict) else ({}, [f"{folder.federation.name} holds no JSON object"])


def _label(path: Path) -> str:
    """The label of a run's method in the plan of its comparison; empty if there is none."""
    try:
        plan = canonical.decode(read_file(path.parent / "plan.json", most=_MOST_BYTES))
        return plain(plan["cells"][path.name]["method"], most=60)
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name, {})
    return found if isinstance(found, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
