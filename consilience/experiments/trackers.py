"""Optional logging to a tracker: each round once, also if a run is resumed; its errors never stop the run."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from consilience.core.settings import Invalid
from consilience.runs.folder import RunFolder
from consilience.runs.names import plain
from consilience.runs.redact import redacted

TRACKERS = {"csv": "csv", "tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb", "aim": "aim"}
"""The trackers, and the package that each needs."""

TAGS = "CONSILIENCE_TAGS"
"""Environment variable with more tags, between commas."""

_journal = logging.getLogger(__name__)
_LONGEST_VALUE = 220  # MLflow's own limit on parameters was 250 for long
_MOST_TAGS = 30


class Tracker(Protocol):
    """A destination for rows; it may raise any exception at any time."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Log one round, unless it was logged before."""
        ...

    def attach(self, files: Sequence[Path]) -> None:
        """Keep files: the model, its description, the settings, the report."""
        ...

    def close(self, status: str) -> None:
        """Flush and close; status: finished, interrupted or failed."""
        ...


class Tracking:
    """A run's tracker: rows that failed are logged again with the next one, and errors become warnings."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._waiting: list[Mapping[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Log one round, and those that failed before."""
        self._waiting.append(row)
        try:
            while self._waiting:
                self._tracker.add(self._waiting[0])
                self._waiting.pop(0)
        except Exception as problem:
            _journal.warning("round %d is not in %s yet: %s", row["round"], self._name, plain(problem))

    def finish(self, status: str, files: Iterable[Path] = ()) -> None:
        """Attach the files that exist, and close."""
        found = [file for file in files if file.is_file()]
        try:
            for row in self._waiting:
                self._tracker.add(row)
            if found:
                self._tracker.attach(found)
        except Exception as problem:
            _journal.warning("%s does not have everything: %s", self._name, plain(problem))
        try:
            self._tracker.close(status)
        except Exception as problem:
            _journal.warning("%s was not told that the run has ended: %s", self._name, plain(problem))


def check(log: str | None) -> None:
    """Refuse a tracker that is not installed, before anything starts."""
    if log is not None and importlib.util.find_spec(TRACKERS[log]) is None:
        raise Invalid(f'log = {log!r} needs a package that is not installed: pip install "consilience[{log}]"')


def opened(log: str | None, folder: RunFolder, settings: Mapping[str, Any]) -> Tracking | None:
    """The tracker of a run, with the rows before this start; None if nothing was asked for.

    One that cannot be opened is refused here, before a round is trained; what fails later is a warning.
    """
    if log is None:
        return None
    from consilience.experiments import tracker_kinds

    try:
        made = Tracking(log, tracker_kinds.KINDS[log](folder, settings))
    except Exception as problem:
        raise Invalid(
            f"log = {log!r} cannot be used now: {type(problem).__name__}: {plain(problem, most=700)}; fix that, or "
            f"continue without it: consilience resume {folder.path} log=none"
        ) from problem
    for row in folder.rows().rows:
        made.add(row)
    return made


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numeric fields of a row."""
    fields = {key: value for key, value in row.items() if key != "round"}
    return {k: float(v) for k, v in fields.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def tags(settings: Mapping[str, Any]) -> list[str]:
    """Algorithm, data set and model, and what CONSILIENCE_TAGS adds."""
    names = [settings.get(section) for section in ("algorithm", "data", "model")]
    own = [str(one["name"]) for one in names if isinstance(one, Mapping) and one.get("name")]
    more = [part.strip() for part in os.environ.get(TAGS, "").split(",")]
    return [plain(tag, most=60) for tag in dict.fromkeys([*own, *filter(None, more)])][:_MOST_TAGS]


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, bool | int | float | str]]:
    """('algorithm.lr', 0.1) and so on, with secrets redacted; what is neither a number nor a truth value is text."""
    for key, value in redacted(settings).items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:  # trackers filter and plot by numbers
            kept = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
            yield f"{prefix}{key}", value if kept else plain(value, most=_LONGEST_VALUE)
