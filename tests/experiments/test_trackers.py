"""Metrics in trackers: every round once, after crashes and resumes too, and no number changes."""

from __future__ import annotations

import csv
import json
import struct
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_runs import SMALL, real, written

from consilience.core.settings import Invalid
from consilience.experiments import runner, tracker_kinds, trackers
from consilience.experiments.config import config
from consilience.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("untraced")


class Server:
    """What MLflow's client talks to, as far as a run uses it; `away` makes every call fail."""

    def __init__(self) -> None:
        self.experiments: dict[str, types.SimpleNamespace] = {}
        self.metrics: dict[str, list[tuple[str, float, int]]] = {}
        self.params: dict[str, dict[str, str]] = {}
        self.ended: list[tuple[str, str]] = []
        self.tags: dict[str, list[str]] = {}
        self.files: dict[str, list[str]] = {}
        self.away = False

    def module(self) -> types.ModuleType:
        """A stand-in for the package."""
        mlflow, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
        entities.Metric = lambda key, value, timestamp, step: (key, value, step)  # type: ignore[attr-defined]
        mlflow.MlflowClient = lambda: self  # type: ignore[attr-defined]
        mlflow.entities = entities  # type: ignore[attr-defined]
        return mlflow

    def get_experiment_by_name(self, name: str) -> Any:
        return self.experiments.get(name)

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = types.SimpleNamespace(experiment_id="7")
        return "7"

    def create_run(self, experiment: str, run_name: str) -> Any:
        number = f"{experiment}-{len(self.metrics)}"
        self.metrics[number], self.params[number] = [], {}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=number))

    def get_run(self, number: str) -> Any:
        return self.metrics[number]

    def log_param(self, run: str, key: str, value: str) -> None:
        self.params[run][key] = value

    def log_batch(self, run: str, metrics: list[tuple[str, float, int]]) -> None:
        if self.away:
            raise ConnectionError("nobody there")
        self.metrics[run] += metrics

    def get_metric_history(self, run: str, key: str) -> list[Any]:
        return [types.SimpleNamespace(step=step) for name, _, step in self.metrics[run] if name == key]

    def set_terminated(self, run: str, status: str) -> None:
        self.ended.append((run, status))

    def update_run(self, run: str, status: str) -> None:
        assert status == "RUNNING" and run in self.metrics

    def set_tag(self, run: str, key: str, value: str) -> None:
        self.tags.setdefault(run, []).append(key)

    def log_artifact(self, run: str, path: str) -> None:
        self.files.setdefault(run, []).append(Path(path).name)

    def steps(self, run: str, key: str = "accuracy") -> list[int]:
        return [step for name, _, step in self.metrics[run] if name == key]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    mlflow = made.module()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", mlflow.entities)
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", "json")  # a package that is there
    return made


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for TensorBoard's writer: a line of JSON for each scalar."""

    class SummaryWriter:
        made = 0

        def __init__(self, log_dir: str) -> None:
            SummaryWriter.made += 1
            Path(log_dir).mkdir(exist_ok=True)
            self.file = Path(log_dir) / f"events.out.tfevents.{SummaryWriter.made}"

        def add_text(self, tag: str, text: str) -> None:
            self.add_scalar(tag, 0.0, 0)

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            with self.file.open("a") as file:
                file.write(json.dumps([tag, value, step]) + "\n")

        def flush(self) -> None:
            pass

        def close(self) -> None:
            pass

        @property
        def file_writer(self) -> Any:
            return types.SimpleNamespace(add_summary=lambda summary: self.add_scalar(summary, 0.0, 0))

    module, summaries = types.ModuleType("torch.utils.tensorboard"), types.ModuleType("torch.utils.tensorboard.summary")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    summaries.hparams = lambda settings, metrics: ("table", "settings", "end")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.summary", summaries)
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", "json")


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    """What all event files of a run hold together."""
    lines = [line for file in (run / "tensorboard").iterdir() for line in file.read_text().splitlines()]
    return [(step, value) for name, value, step in map(json.loads, lines) if name == tag]


def stop_after(folder: Path, rounds: int, *settings: str, close: bool = False) -> None:
    """A run that dies without a word after so many rounds, with its last checkpoint one round back."""
    with runner.start(config.load(None, [*SMALL, *settings, "checkpoint.every=2"]), folder=folder) as run:
        run._tracker = trackers.opened(run.config.log, run.folder, run.config.table())
        for observation in run.observations():
            if observation.round.number == rounds:
                if close:  # a process that dies takes the tracker's own along
                    run._tracker.finish("failed")  # type: ignore[union-attr]
                return


def test_nothing_is_logged_unasked(tmp_path: Path) -> None:
    assert not (real(tmp_path / "a") / "tensorboard").exists()


@pytest.mark.usefixtures("events")
def test_tensorboard_has_every_round_once_after_a_crash(tmp_path: Path) -> None:
    run = tmp_path / "a"
    stop_after(run, 3, "log=tensorboard", "rounds=5")
    assert [step for step, _ in scalars(run, "accuracy")] == [1, 2, 3]
    runner.proceed(run)  # from round 2: round 3 comes again
    rows = RunFolder.open(run).rows().rows
    assert sorted(scalars(run, "accuracy")) == [(row["round"], row["accuracy"]) for row in rows]
    assert len(rows) == 5


@pytest.mark.usefixtures("events")
def test_logging_begun_late_has_the_rounds_before_and_changes_no_number(tmp_path: Path) -> None:
    late, never = real(tmp_path / "late"), real(tmp_path / "never", "rounds=4")
    runner.proceed(late, ["rounds=4", "log=tensorboard"])
    assert [step for step, _ in scalars(late, "loss")] == [1, 2, 3, 4]
    assert (late / "metrics.jsonl").read_bytes() == (never / "metrics.jsonl").read_bytes()
    runner.proceed(late, ["rounds=5", "log=none"])
    assert len(scalars(late, "loss")) == 4


def test_mlflow_has_every_round_once_after_a_crash(tmp_path: Path, server: Server) -> None:
    run = tmp_path / "a"
    stop_after(run, 3, "log=mlflow", "rounds=5")
    runner.proceed(run)
    (number,) = server.metrics
    assert server.steps(number) == [1, 2, 3, 4, 5] and server.ended == [(number, "FINISHED")]
    assert server.files[number] == ["config.toml", "model.safetensors", "model.json"]
    assert server.tags[number] == ["consilience.simprox", "consilience.digits", "consilience.mlp"]
    assert RunFolder.open(run).facts()["mlflow_run"] == number
    assert server.params[number]["algorithm.name"] == "simprox"
    values = {step: value for name, value, step in server.metrics[number] if name == "accuracy"}
    assert values == {row["round"]: row["accuracy"] for row in RunFolder.open(run).rows().rows}


def test_a_server_that_goes_away_does_not_stop_the_run(tmp_path: Path, server: Server) -> None:
    with runner.start(config.load(None, [*SMALL, "log=mlflow"]), folder=tmp_path / "a") as run:

        def watch(live: Any) -> Any:
            for observation in live.observations():
                server.away = observation.round.number == 1  # while round 2 is logged
                yield observation

        run.complete(watch)
    (number,) = server.metrics
    assert server.steps(number) == [1, 2, 3]


def test_a_server_that_is_not_there_is_said_and_the_run_can_go_on(tmp_path: Path, server: Server) -> None:
    server.create_experiment = lambda name: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    with pytest.raises(Invalid, match="log=none"):
        runner.execute(config.load(None, [*SMALL, "log=mlflow"]), folder=tmp_path / "a")
    runner.proceed(tmp_path / "a", ["log=none"])
    assert len(RunFolder.open(tmp_path / "a").rows().rows) == 3


def test_secrets_are_not_passed_on(tmp_path: Path, server: Server) -> None:
    folder = RunFolder.open(written(tmp_path, "a"))
    tracker = trackers.opened("mlflow", folder, {"hub_token": "hf_123456", "data": {"address": "https://me:pw@host"}})
    assert tracker is not None
    (params,) = server.params.values()
    assert params["hub_token"] == "***" and "pw" not in params["data.address"]


def test_what_is_not_installed_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", "no_such_package")
    with pytest.raises(Invalid, match=r'pip install "consilience\[mlflow\]"'):
        runner.execute(config.load(None, [*SMALL, "log=mlflow"]), folder=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(Invalid, match="log = 'neptune'"):
        config.load(None, ["log=neptune"])


def test_real_tensorboard_reads_it_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason='needs pip install "consilience[tensorboard]"')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    run = tmp_path / "a"
    stop_after(run, 3, "log=tensorboard", "rounds=5")
    runner.proceed(run)
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    rows = RunFolder.open(run).rows().rows
    assert [event.step for event in found.Scalars("accuracy")] == [1, 2, 3, 4, 5]
    assert [event.value for event in found.Scalars("loss")] == pytest.approx([row["loss"] for row in rows], rel=1e-6)
    pieces = found.summary_metadata  # of the tab HPARAMS
    names = [f"_hparams_/{name}" for name in ("experiment", "session_start_info", "session_end_info")]
    assert set(names) <= set(pieces)
    chosen = HParamsPluginData.FromString(pieces[names[1]].plugin_data.content).session_start_info.hparams
    assert chosen["algorithm.lr"].number_value == 0.2 and chosen["algorithm.name"].string_value == "simprox"
    table = HParamsPluginData.FromString(pieces[names[0]].plugin_data.content).experiment
    assert {"accuracy", "loss"} <= {metric.name.tag for metric in table.metric_infos}


def test_csv_has_every_round_once_and_a_late_metric_gets_a_column(tmp_path: Path) -> None:
    run = tmp_path / "a"
    stop_after(run, 3, "log=csv", "rounds=5", "evaluation.every=2")  # round 1 has no accuracy
    assert len((run / "metrics.csv").read_text().splitlines()) == 4
    runner.proceed(run)
    with (run / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    rows = RunFolder.open(run).rows().rows
    assert [int(row["round"]) for row in table] == [1, 2, 3, 4, 5]
    assert [row["accuracy"] and float(row["accuracy"]) for row in table] == [row["accuracy"] or "" for row in rows]
    assert [float(row["train_loss"]) for row in table] == [row["train_loss"] for row in rows]


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 kB, each record in one piece or in several."""
    whole, at = b"", 0
    header = 7  # W&B's own comes first and counts for the first block
    while at + 7 <= len(data):
        left = 32768 - (at + header) % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            yield whole
            whole = b""


@pytest.mark.slow
def test_real_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts, one run: what the files hold together is every round once, with settings, tags and the model."""
    pytest.importorskip("wandb", reason='needs pip install "consilience[wandb]"')
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("CONSILIENCE_TAGS", "study-7, ,x")
    run = tmp_path / "a"
    stop_after(run, 3, "log=wandb", "rounds=5", close=True)
    time.sleep(1.1)  # W&B names its offline folders by the second
    runner.proceed(run)
    known = RunFolder.open(run).facts()["wandb_run"]
    rows, deadline = RunFolder.open(run).rows().rows, time.monotonic() + 30
    while True:  # W&B's own process may write its file after `finish`
        steps, found, files, settings = [], set(), set(), {}
        for file in sorted((run / "wandb").rglob("*.wandb")):
            assert known in file.name
            for data in leveldb_records(file.read_bytes()[7:]):
                record = Record.FromString(data)
                items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                steps += [(int(items["_step"]), float(items["accuracy"]))] if "accuracy" in items else []
                found |= set(record.run.tags) | {item.key for item in record.run.config.update}
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
                files |= {entry.path for entry in record.request.log_artifact.artifact.manifest.contents}
                files |= {entry.path for entry in record.artifact.manifest.contents}
        if len(steps) >= len(rows) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert steps == [(row["round"], row["accuracy"]) for row in rows]
    assert {"study-7", "x", "simprox", "algorithm.name", "seed"} <= found
    assert {"model.safetensors", "config.toml"} <= files
    assert settings["algorithm.lr"] == 0.2 and settings["rounds"] == 5  # numbers, by which W&B filters and plots


def test_real_mlflow_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason='needs pip install "consilience[mlflow]"')
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = tmp_path / "a"
    stop_after(run, 3, "log=mlflow", "rounds=5")
    runner.proceed(run)
    client = MlflowClient()
    known = client.get_run(RunFolder.open(run).facts()["mlflow_run"])
    history = client.get_metric_history(known.info.run_id, "accuracy")
    rows = RunFolder.open(run).rows().rows
    assert [(one.step, one.value) for one in history] == [(row["round"], row["accuracy"]) for row in rows]
    assert known.info.status == "FINISHED" and known.data.params["algorithm.name"] == "simprox"
    assert known.data.tags["consilience.digits"] == "true"
    kept = {file.path for file in client.list_artifacts(known.info.run_id)}
    assert kept == {"config.toml", "model.safetensors", "model.json"}


def test_real_aim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aim = pytest.importorskip("aim", reason='needs pip install "consilience[aim]"')
    from aim.storage.context import Context

    monkeypatch.chdir(tmp_path)  # where Aim makes its repository
    monkeypatch.setenv("CONSILIENCE_TAGS", "study-7")
    run = tmp_path / "a"
    stop_after(run, 3, "log=aim", "rounds=5", close=True)
    known = RunFolder.open(run).facts()["aim_run"]
    runner.proceed(run)
    assert RunFolder.open(run).facts()["aim_run"] == known
    found = aim.Run(run_hash=known, system_tracking_interval=None, log_system_params=False)
    try:
        (steps, (values, *_)) = found.get_metric("accuracy", Context({})).data.items_list()
        rows = RunFolder.open(run).rows().rows
        assert list(zip(steps, values)) == [(row["round"], row["accuracy"]) for row in rows]
        assert {"study-7", "simprox", "digits"} <= set(found.tags) and found["status"] == "finished"
        assert found["settings"]["algorithm.name"] == "simprox" and found.name == "a"
        assert {"config.toml", "model.safetensors", "model.json"} == set(found.artifacts)
        assert (tmp_path / ".aim" / "artifacts" / known / "config.toml").read_bytes() == (
            run / "config.toml"
        ).read_bytes()
    finally:
        found.close()


class Broken:
    """A tracker that takes nothing."""

    def add(self, row: Any) -> None:
        raise SystemError("add")

    def attach(self, files: Any) -> None:
        raise SystemError("attach")

    def close(self, status: str) -> None:
        raise SystemError("close")


def test_a_tracker_that_fails_everywhere_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(tracker_kinds.KINDS, "csv", lambda folder, settings: Broken())
    runner.execute(config.load(None, [*SMALL, "log=csv"]), folder=tmp_path / "a")
    assert RunFolder.open(tmp_path / "a").facts()["status"] == "finished"
    assert "round 1 is not in csv yet: add" in caplog.text and "close" in caplog.text


def test_the_report_is_kept_with_the_model(tmp_path: Path, server: Server) -> None:
    settings = config.load(None, [*SMALL, "log=mlflow"])

    def draw(result: Any) -> Path:
        page = Path(result.folder) / "report.html"
        page.write_text("a page")
        return page

    runner.execute(settings, folder=tmp_path / "a", report=draw)
    (files,) = server.files.values()
    assert files == ["config.toml", "model.safetensors", "model.json", "report.html"]
