"""Optional logging to TensorBoard or MLflow: each round once, also when a run is resumed."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from consilience.core.settings import Invalid
from consilience.runs.disk import make_inner_folder
from consilience.runs.folder import RunFolder
from consilience.runs.names import plain
from consilience.runs.redact import redacted

TRACKERS = {"tensorboard": "tensorboard", "mlflow": "mlflow"}
"""What can be logged to, and the package that it needs."""

PLACE = "tensorboard"  # in the run folder
_journal = logging.getLogger(__name__)
_LONGEST_VALUE = 250  # MLflow's own limit on parameters was this for long


class Tracker(Protocol):
    """Somewhere that rows are logged to."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Log one round."""
        ...

    def close(self) -> None:
        """Write what is not yet written."""
        ...


def check(log: str | None) -> None:
    """Refuse to log to what is not installed, before anything starts."""
    if log is not None and importlib.util.find_spec(TRACKERS[log]) is None:
        raise Invalid(f'log = {log!r} needs a package that is not installed: pip install "consilience[{log}]"')


def opened(log: str | None, folder: RunFolder, settings: Mapping[str, Any]) -> Tracker | None:
    """The tracker of a run, which has the rows before this start already; None if nothing was asked for."""
    if log is None:
        return None
    try:
        return (_TensorBoard if log == "tensorboard" else _MLflow)(folder, settings)
    except Exception as problem:
        raise Invalid(
            f"log = {log!r} cannot be used now: {type(problem).__name__}: {plain(problem, most=400)}; fix that, or "
            f"continue without it: consilience resume {folder.path} log=none"
        ) from problem


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The fields of a row that are curves."""
    fields = {key: value for key, value in row.items() if key != "round"}
    return {k: float(v) for k, v in fields.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


class _TensorBoard:
    """Event files in the run folder, rewritten from the metrics at every start, so that no row is there twice."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder.path / PLACE
        make_inner_folder(place)
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer: Any = SummaryWriter(log_dir=str(place))
        self._writer.add_text("settings", "\n".join(f"    {key} = {value}" for key, value in _flat(settings)))
        for row in folder.rows().rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        for key, value in numbers(row).items():
            self._writer.add_scalar(key, value, row["round"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _MLflow:
    """One run at the tracking server that MLFLOW_TRACKING_URI names; its id is among the facts of ours."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        # no usage statistics
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        self._run = self._found(folder) or self._made(folder, settings)
        known = self._client.get_metric_history(self._run, "round")
        self._logged = {metric.step for metric in known}
        self._waiting: list[Mapping[str, Any]] = []
        for row in folder.rows().rows:
            self._send(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """An unreachable server does not stop the run: rows are sent with the next round, or at the next start."""
        self._waiting.append(row)
        try:
            while self._waiting:
                self._send(self._waiting[0])
                self._waiting.pop(0)
        except Exception as problem:
            _journal.warning("round %d is not in MLflow yet: %s", row["round"], plain(problem))

    def close(self) -> None:
        try:
            self._client.set_terminated(self._run)
        except Exception as problem:
            _journal.warning("MLflow was not notified that the run has ended: %s", plain(problem))

    def _send(self, row: Mapping[str, Any]) -> None:
        if row["round"] in self._logged:  # logged before a crash, and the same now
            return
        from mlflow.entities import Metric

        now = _milliseconds()
        found = {**numbers(row), "round": float(row["round"])}  # `round` says which rounds are complete
        metrics = [Metric(key, value, now, row["round"]) for key, value in found.items()]
        self._client.log_batch(self._run, metrics=metrics)
        self._logged.add(row["round"])

    def _found(self, folder: RunFolder) -> str:
        """The id that an earlier start wrote down, if the server still has it."""
        known = str(folder.facts().get("mlflow_run", ""))
        if not known:
            return ""
        try:
            self._client.get_run(known)
        except Exception:  # another server, or a run deleted there
            return ""
        return known

    def _made(self, folder: RunFolder, settings: Mapping[str, Any]) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "consilience")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        made = str(self._client.create_run(number, run_name=folder.name).info.run_id)
        for key, value in _flat(settings):
            self._client.log_param(made, key, value)
        folder.record(mlflow_run=made)
        return made


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in redacted(settings).items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", plain(value, most=_LONGEST_VALUE - 30)


def _milliseconds() -> int:
    return int(time.time() * 1000)
