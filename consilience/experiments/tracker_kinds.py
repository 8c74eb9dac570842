"""The trackers: CSV, TensorBoard, MLflow, W&B, Aim; a resumed run continues the one whose id is in its facts."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from consilience.experiments.trackers import Tracker, flat, numbers, tags
from consilience.runs import metric_table
from consilience.runs.disk import make_inner_folder, open_file, read_file, replace_file
from consilience.runs.folder import RunFolder

TENSORBOARD = "tensorboard"  # in the run folder
CSV = "metrics.csv"  # there, too
WANDB = "wandb"
PROJECT = "consilience"


class _Csv:
    """A table in the run folder, rewritten at every start, so that no row is duplicated."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        self._path = folder.path / CSV
        self._rows: list[dict[str, Any]] = []
        self._columns = ["round"]
        replace_file(self._path, b"round\n")

    def add(self, row: Mapping[str, Any]) -> None:
        found = {"round": row["round"], **numbers(row)}
        new = [key for key in found if key not in self._columns]
        self._columns += new
        self._rows.append(found)
        if new:  # a metric that appears later gets a new column
            replace_file(
                self._path, (self._text([dict(zip(self._columns, self._columns))]) + self._text(self._rows)).encode()
            )
        else:
            with os.fdopen(open_file(self._path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8") as stream:
                stream.write(self._text([found]))

    def attach(self, files: Sequence[Path]) -> None:
        """Do nothing: the files are in the same folder."""

    def close(self, status: str) -> None:
        """Do nothing: all rows are written."""

    def _text(self, rows: Sequence[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="", lineterminator="\n").writerows(rows)
        return text.getvalue()


class _TensorBoard:
    """Event files in the run folder, rewritten from the metrics at every start, so that no row is duplicated."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        place = folder.path / TENSORBOARD
        make_inner_folder(place)
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer: Any = SummaryWriter(log_dir=str(place))
        self._writer.add_text("settings", "\n".join(f"    {key} = {value}" for key, value in flat(settings)))
        shown = dict.fromkeys([metric.key for metric in metric_table.read(folder.facts(), [])], 0.0)
        *begin, self._end = hparams(dict(flat(settings)), shown)  # HPARAMS: a table of runs by settings and metrics
        self._tell(*begin)
        self._writer.add_text("tags", ", ".join(tags(settings)))

    def add(self, row: Mapping[str, Any]) -> None:
        for key, value in numbers(row).items():
            self._writer.add_scalar(key, value, row["round"])
        self._writer.flush()

    def attach(self, files: Sequence[Path]) -> None:
        self._writer.add_text("files", "\n".join(f"    {file}" for file in files))

    def close(self, status: str) -> None:
        if status == "finished":
            self._tell(self._end)
        self._writer.close()

    def _tell(self, *summaries: Any) -> None:
        for summary in summaries:
            self._writer.file_writer.add_summary(summary)


class _MLflow:
    """One run at the tracking server that MLFLOW_TRACKING_URI names; its id is stored in our run's facts."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        # no usage statistics
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        self._run = self._found(folder) or self._made(folder, settings)
        known = self._client.get_metric_history(self._run, "round")
        self._logged = {metric.step for metric in known}

    def add(self, row: Mapping[str, Any]) -> None:
        if row["round"] in self._logged:  # logged before a crash, and unchanged
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = {**numbers(row), "round": float(row["round"])}  # `round` says which rounds are complete
        metrics = [Metric(key, value, now, row["round"]) for key, value in found.items()]
        self._client.log_batch(self._run, metrics=metrics)
        self._logged.add(row["round"])

    def attach(self, files: Sequence[Path]) -> None:
        for file in files:
            self._client.log_artifact(self._run, str(file))

    def close(self, status: str) -> None:
        named = {"finished": "FINISHED", "interrupted": "KILLED"}
        self._client.set_terminated(self._run, named.get(status, "FAILED"))

    def _found(self, folder: RunFolder) -> str:
        """The id that an earlier start stored, if the server still has it; its status is then set to running."""
        known = str(folder.facts().get("mlflow_run", ""))
        if not known:
            return ""
        try:
            self._client.get_run(known)
        except Exception:  # another server, or a run deleted there
            return ""
        self._client.update_run(known, status="RUNNING")
        return known

    def _made(self, folder: RunFolder, settings: Mapping[str, Any]) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        made = str(self._client.create_run(number, run_name=folder.name).info.run_id)
        for key, value in flat(settings):
            self._client.log_param(made, key, str(value))
        for tag in tags(settings):
            self._client.set_tag(made, f"consilience.{tag}", "true")
        folder.record(mlflow_run=made)
        return made


class _WeightsAndBiases:
    """One W&B run, continued by its id; offline (WANDB_MODE=offline) each start writes files for `wandb sync`."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        import wandb

        place = folder.path / WANDB
        make_inner_folder(place)
        known = str(folder.facts().get("wandb_run", ""))
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=known or None,
            name=folder.name,
            resume="allow" if known else None,
            config=dict(flat(settings)),
            tags=tags(settings),
            dir=str(place),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )
        if self._run.id != known:
            folder.record(wandb_run=self._run.id)
        # Offline it is unknown which rounds the server has, and a round must not be sent twice.
        self._last_file = place / f"{self._run.id}.rounds"
        self._last = 0
        with contextlib.suppress(OSError, ValueError):
            self._last = int(read_file(self._last_file, most=64))

    def add(self, row: Mapping[str, Any]) -> None:
        if row["round"] <= self._last:
            return
        self._run.log(numbers(row), step=row["round"])
        self._last = row["round"]
        replace_file(self._last_file, str(self._last).encode())

    def attach(self, files: Sequence[Path]) -> None:
        import wandb

        kept = wandb.Artifact(f"run-{self._run.id}", type="model")
        for file in files:
            kept.add_file(str(file))
        self._run.log_artifact(kept)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class _Aim:
    """One run in Aim's repository, continued by its hash; a round that is logged again replaces itself."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        self._run: Any = self._opened(str(folder.facts().get("aim_run", "")))
        if folder.facts().get("aim_run") != self._run.hash:
            folder.record(aim_run=self._run.hash)
        self._run.name = folder.name
        self._run["settings"] = dict(flat(settings))
        for tag in set(tags(settings)) - set(self._run.tags):
            self._run.add_tag(tag)
        self._run["status"] = "running"

    def add(self, row: Mapping[str, Any]) -> None:
        for key, value in numbers(row).items():
            self._run.track(value, name=key, step=row["round"])

    def attach(self, files: Sequence[Path]) -> None:
        self._run.set_artifacts_uri((Path(self._run.repo.path) / "artifacts").as_uri())
        for file in files:
            self._run.log_artifact(str(file), file.name, block=True)

    def close(self, status: str) -> None:
        self._run["status"] = status
        self._run.close()

    def _opened(self, known: str) -> Any:
        """The run of an earlier start, if the repository still has it, else a new one."""
        from aim import Run
        from aim.sdk.errors import MissingRunError

        # neither the machine's environment nor the terminal's text, which may hold secrets
        common = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}
        if known:
            with contextlib.suppress(MissingRunError):
                return Run(run_hash=known, **common)
        return Run(experiment=PROJECT, **common)


KINDS: dict[str, Callable[[RunFolder, Mapping[str, Any]], Tracker]] = {
    "csv": _Csv,
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _WeightsAndBiases,
    "aim": _Aim,
}
