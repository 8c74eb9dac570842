"""A run records what the issue says, byte for byte the same each time, and refuses what does not fit together."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Unpack

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from consilience.algorithms._common import Common, averaged
from consilience.algorithms.fedavg import fedavg
from consilience.client.local_training import LocalTraining
from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.exchange import Cohort, Pool
from consilience.core.federation import Federation
from consilience.core.plans import Batch, Work
from consilience.core.rounds import Diverged
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.data import partition
from consilience.experiments import assembly, evaluation, record, runner
from consilience.experiments.config import catalogue, config
from consilience.experiments.live_run import Run
from consilience.runs import checkpoint, identity
from consilience.runs.checkpoint import CheckpointError
from consilience.runs.disk import disk
from consilience.runs.folder import RecordError, RunFolder
from consilience.runs.observation import Observation
from consilience.runs.result import Result
from consilience.training import train

pytestmark = pytest.mark.usefixtures("untraced")

SMALL = ("rounds=3", "model=logistic", "partition.clients=6", "algorithm.epochs=1", "engine.lane=serial", "threads=1")
ROW = {
    *("round", "loss", "accuracy", "precision", "recall", "f1", "calibration_error"),
    *("cohort", "weights", "train_loss", "drift", "drift_relative"),
    *("client_accuracy_mean", "client_accuracy_median", "client_accuracy_worst_tenth", "client_accuracy_spread"),
    *("bytes_up", "bytes_down", "bytes_up_total", "bytes_down_total", "silent", "empty_client", "nonfinite"),
    *("late", "clipped_updates", "memory_lost", "worker_lost", "rejected", "simulated_seconds"),
}


def run(tmp_path: Path, *overrides: str, **options: Any) -> Result:
    return runner.execute(config.load(None, [*SMALL, f"runs={tmp_path}", *overrides]), **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("runs"), "algorithm.selection.fraction=0.5")


def folder_of(result: Result) -> RunFolder:
    assert result.folder is not None
    return RunFolder.open(result.folder)


def test_the_folder_holds_all_that_the_run_was(finished: Result) -> None:
    folder = folder_of(finished)
    facts = folder.facts()
    assert facts["status"] == "finished" and facts["versions"]["torch"] == str(torch.__version__)
    assert facts["prints"]["partition"] == partition.fingerprint(partition.load(folder.partition))
    assert facts["code"] == identity.code() and "SlidingWindow(fraction=0.5)" in facts["algorithm"]
    resolved = config.load(folder.path / "config.toml")
    assert resolved.engine["lane"] == "serial" and resolved.engine["device"] == "cpu" and resolved.threads == 1
    assert resolved.engine["clients_at_once"] >= 1  # found by the first round
    assert [checkpoint.round_of(path) for path in checkpoint.generations(folder.checkpoints)] == [2, 3]


def test_every_round_has_exactly_these_numbers(finished: Result) -> None:
    rows = folder_of(finished).rows().rows
    assert rows == finished.history and [row["round"] for row in rows] == [1, 2, 3]
    for before, row in zip([{"bytes_up_total": 0, "bytes_down_total": 0}, *rows], rows):
        assert set(row) == ROW
        assert len(row["cohort"]) == len(row["weights"]) == 3 and sum(row["weights"]) == pytest.approx(1, abs=1e-12)
        assert row["bytes_up_total"] == before["bytes_up_total"] + row["bytes_up"]
        assert row["bytes_down_total"] == before["bytes_down_total"] + row["bytes_down"]
        assert row["bytes_down"] == 3 * 4 * 650 and row["train_loss"] > 0 and row["drift"] > 0
    timing = folder_of(finished).timing.read().rows
    assert [set(row) for row in timing] == [{"round", "seconds", "evaluation_seconds", "clients_per_second"}] * 3


def test_numbers_of_the_last_row_are_those_of_the_exported_model(finished: Result) -> None:
    assert finished.folder is not None
    experiment = assembly.assemble(config.load(finished.folder / "config.toml"))
    state = safetensors.torch.load_file(finished.folder / "model.safetensors")
    module = experiment.task.module
    module.load_state_dict(state)
    test = experiment.federation.test
    assert test is not None
    with torch.no_grad():
        output = module(test.x)
    last = finished.history[-1]
    assert last["accuracy"] == pytest.approx(float((output.argmax(1) == test.y).double().mean()), abs=1e-12)
    assert last["loss"] == pytest.approx(float(nn.functional.cross_entropy(output, test.y)), rel=1e-5)
    own = [(output.argmax(1) == test.y)[s : s + n].double().mean() for s, n in zip(test.starts, test.sizes) if n]
    assert last["client_accuracy_mean"] == pytest.approx(float(torch.stack(own).mean()), abs=1e-12)
    assert all(torch.equal(value, state[name]) for name, value in finished.model.state_dict().items())
    manifest = json.loads((finished.folder / "model.json").read_text())
    assert manifest["inputs"] == [1, 8, 8] and manifest["classes"] == 10 and manifest["round"] == 3


def test_drift_and_training_loss_by_hand() -> None:
    """One step of full-batch descent on one client: drift is lr |gradient|, the loss is the one before the step."""
    x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([1])
    module = nn.Linear(2, 2, bias=False)
    nn.init.constant_(module.weight, 0.5)
    found = train(module, Federation.from_clients([(x, y)]), fedavg(lr=0.1), rounds=1, progress=False, lane="serial")
    row = found.history[0]
    gradient = np.outer([0.5, -0.5], [1.0, 2.0])  # softmax of equal logits minus the target, times x
    assert row["train_loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert row["drift"] == pytest.approx(0.1 * np.linalg.norm(gradient), rel=1e-6)
    assert row["drift_relative"] == pytest.approx(0.1 * np.linalg.norm(gradient) / 1.0, rel=1e-6)
    assert row["weights"] == [1.0] and row["accuracy"] is None


def test_clients_that_did_no_step_say_nothing_of_the_training_loss() -> None:
    """Losses 4 and 1 of clients with 10 and 30 rows; the third, with 60, did no step and reports 0."""

    def loss(steps: list[int]) -> float | None:
        cohort = Cohort(
            reply={"loss": torch.tensor([4.0, 1.0, 0.0])},
            ids=np.arange(3),
            examples=torch.tensor([10.0, 30.0, 60.0], dtype=torch.float64),
            steps=np.array(steps),
            round=0,
        )
        round: Any = SimpleNamespace(cohort=cohort, notes={})
        return record._training(round, None, 0.0)["train_loss"]

    assert loss([2, 1, 0]) == (10 * 4 + 30 * 1) / 40 and loss([2, 1, 5]) == 0.7
    assert loss([0, 0, 0]) is None


def test_the_stored_config_repeats_the_run_byte_for_byte(finished: Result, tmp_path: Path) -> None:
    assert finished.folder is not None
    again = runner.execute(config.load(finished.folder / "config.toml", [f"runs={tmp_path}"]))
    assert again.folder is not None and again.folder != finished.folder
    for file in ("metrics.jsonl", "model.safetensors"):
        assert (again.folder / file).read_bytes() == (finished.folder / file).read_bytes()


def test_a_measured_lane_is_written_down_before_the_first_checkpoint(tmp_path: Path) -> None:
    settings = config.load(None, [*SMALL, f"runs={tmp_path}", "engine.lane=auto"])
    with runner.start(settings) as live:
        next(live.observations())
        stored = config.load(live.folder.path / "config.toml")
        assert stored.engine["lane"] == live.experiment.engine.choice.lane != "auto"
        assert live.folder.facts()["config"]["engine"]["lane"] == stored.engine["lane"]
        assert checkpoint.load_latest(live.folder.checkpoints) is not None


def test_a_taken_name_is_numbered_and_a_taken_folder_refused(tmp_path: Path) -> None:
    first, second = run(tmp_path, "name=twice", "rounds=1"), run(tmp_path, "name=twice", "rounds=1")
    assert first.folder == tmp_path / "twice" and second.folder == tmp_path / "twice-2"
    with pytest.raises(Invalid, match="consilience resume"):
        run(tmp_path, folder=tmp_path / "twice")


def test_evaluation_every_other_round_and_after_the_last(tmp_path: Path) -> None:
    rows = run(tmp_path, "evaluation.every=2").history
    assert [row["accuracy"] is not None for row in rows] == [False, True, True]
    assert [set(row) == ROW for row in rows] == [True] * 3
    assert all(row["accuracy"] is None for row in run(tmp_path, "evaluation.every=0").history)


def test_silent_and_empty_clients_are_counted(tmp_path: Path) -> None:
    overrides = (
        "partition={name='quantity', clients=4, kind='sizes', sizes=[500, 500, 438, 0]}",
        "partition.min_size=0",
    )
    found = run(tmp_path, *overrides, "environment.communication=[1.0, 1.0, 0.0, 1.0]", "algorithm=fedavg")
    assert [row["cohort"] for row in found.history] == [[0, 1]] * 3
    assert [row["silent"] for row in found.history] == [1, 1, 1]


def test_a_diverging_run_stops_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="learning rate"):
        run(tmp_path, "rounds=9", "algorithm.lr=1e38", "algorithm.epochs=5", "algorithm=fedavg")
    folder = RunFolder.open(tmp_path / "fedavg-digits")
    assert folder.facts()["status"] == "diverged" and "learning rate" in folder.facts()["reason"]
    saved = checkpoint.load_latest(folder.checkpoints)
    assert saved is not None and all(
        leaf.isfinite().all() for leaf in saved.trees["server"]["model"]["params"].values()
    )
    assert folder.rows().rows[-1]["nonfinite"] > 0


class Broken:
    """Weights that cannot be used."""

    needs_each_reply = True

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def init(self, start: Any, clients: int) -> dict[str, Any]:
        return {}

    def weigh(self, cohort: Any, model: Any, state: Any) -> Any:
        return torch.full_like(cohort.examples, self.weight), state, {}


@pytest.mark.parametrize("weight", [0.0, float("nan"), float("inf")])
def test_unusable_weights_stop_the_run_and_name_the_round(weight: float) -> None:
    federation = Federation.from_clients([(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))] * 2)
    with pytest.raises(Diverged, match="round 1: the aggregation weights"):
        train(nn.Linear(2, 2), federation, fedavg(weighting=Broken(weight)), rounds=2, progress=False, lane="serial")


def test_a_regression(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(3):
        x = torch.randn(40, 3, generator=generator)
        clients.append((x, x @ torch.tensor([[1.0], [-2.0], [0.5]])))
    federation = Federation.from_clients(clients, client_tests=clients)
    found = train(nn.Linear(3, 1), federation, fedavg(lr=0.1), rounds=15, progress=False, lane="serial")
    assert set(found.history[0]) == ROW - {"accuracy", "precision", "recall", "f1", "calibration_error"} - {
        f"client_accuracy_{name}" for name in ("mean", "median", "worst_tenth", "spread")
    } | {
        *("absolute_error", "rmse", "r2"),
        *(f"client_absolute_error_{name}" for name in ("mean", "median", "worst_tenth", "spread")),
    }
    assert found.history[-1]["client_absolute_error_worst_tenth"] >= found.history[-1]["client_absolute_error_mean"] > 0
    assert found.history[-1]["absolute_error"] < 0.05 < found.history[0]["absolute_error"]
    assert "mean absolute error" in found.table() and "accuracy" not in found.table()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data=breast_cancer", "model=cnn"), r"model.*cnn.*not a picture"),
        (("algorithm.selection={name='uniform', count=7}",), r"algorithm\.selection\.count = 7 .* 6 clients"),
        (("environment.epochs=[1, 2, 3]",), r"environment.*epochs has 3 values for 6 clients"),
        (("partition.min_size=400",), r"partition.*min_size"),
        (("partition=natural", "partition.clients="), r"partition.*natural"),
        (("model=char_lstm",), r"model\.vocabulary is missing"),
        (("model=char_lstm", "model.vocabulary=10"), r"model.*char_lstm"),
        (("loss=binary_cross_entropy",), r"loss = 'binary_cross_entropy' is for 2 classes"),
        (("loss=squared_error",), r"loss = 'squared_error' does not fit"),
        (("engine.device=nosuch",), r"engine: device = 'nosuch'"),
        (("data=npz", "data.file=absent.npz"), r"absent\.npz"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_starts(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises((Invalid, FileNotFoundError), match=message):
        run(tmp_path / "runs", *overrides)
    assert not (tmp_path / "runs").exists()


def test_test_rows_are_needed_unless_nothing_is_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = assembly.datasets.load

    def without(name: str, **options: Any) -> Any:
        data = load(name, **options)
        return dataclasses.replace(data, test_x=data.test_x[:0], test_y=data.test_y[:0])

    monkeypatch.setattr(assembly.datasets, "load", without)
    with pytest.raises(Invalid, match=r"no test rows.*evaluation\.every=0"):
        run(tmp_path)
    assert run(tmp_path, "evaluation.every=0", "rounds=1").history[0]["accuracy"] is None


def stop_after(rounds: int) -> Any:
    def watch(live: Run) -> Iterator[Observation]:
        for observation in live.observations():
            yield observation
            if observation.round.number == rounds:
                raise KeyboardInterrupt

    return watch


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, folder=tmp_path / "stopped", watch=stop_after(2))
    return tmp_path / "stopped"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("algorithm.lr=0.3",), "algorithm.lr: 0.2 -> 0.3"),
        (("algorithm.selection=everyone",), "algorithm.selection"),
        (("seed=1",), "seed: 0 -> 1"),
        (("partition.alpha=5", "engine.dtype=float64"), "partition.alpha: 0.5 -> 5.0"),
        (("engine.lane=batched",), "engine.lane"),
        (("threads=2",), "threads"),
    ],
)
def test_resume_refuses_changed_settings_by_key(stopped: Path, overrides: tuple[str, ...], key: str) -> None:
    before = {path.name: path.read_bytes() for path in stopped.iterdir() if path.is_file()}
    with pytest.raises(Invalid) as caught:
        runner.proceed(stopped, overrides)
    assert key in str(caught.value) and "--force" in str(caught.value)
    assert {path.name: path.read_bytes() for path in stopped.iterdir() if path.is_file()} == before


def test_resume_refuses_a_config_file_edited_by_hand(stopped: Path) -> None:
    file = stopped / "config.toml"
    file.write_text(file.read_text().replace("lr = 0.2", "lr = 0.25"))
    with pytest.raises(RecordError, match=r"config\.toml was changed"):
        runner.proceed(stopped)


def test_resume_refuses_other_code_other_data_another_split(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "1.0")
        with pytest.raises(Invalid, match=r"code\.torch: .* -> '1\.0'"):
            runner.proceed(stopped)
    with monkeypatch.context() as patch:
        patch.setattr(identity, "source_digest", lambda: "0" * 64)
        with pytest.raises(Invalid, match=r"code\.source"):
            runner.proceed(stopped)
    load = assembly.datasets.load

    def changed(name: str, **options: Any) -> Any:
        data = load(name, **options)
        data.x[3, 0, 4, 4] += 0.5
        return data

    with monkeypatch.context() as patch:
        patch.setattr(assembly.datasets, "load", changed)
        with pytest.raises(Invalid, match=r"fingerprint\.data"):
            runner.proceed(stopped)
    parts = partition.load(stopped / "partition.npz")
    partition.save([parts[1], parts[0], *parts[2:]], stopped / "partition.npz")
    with pytest.raises(RecordError, match=r"partition\.npz was changed"):
        runner.proceed(stopped)


def test_force_goes_on_and_is_recorded(stopped: Path) -> None:
    found = runner.proceed(stopped, ["algorithm.lr=0.3"], force=True)
    assert len(found.history) == 3
    facts = folder_of(found).facts()
    assert facts["forced"] == [{"round": 2, "changes": ["algorithm.lr: 0.2 -> 0.3"]}]
    assert config.load(stopped / "config.toml").algorithm.options["lr"] == 0.3
    assert len(runner.proceed(stopped, ["rounds=4"]).history) == 4  # the new settings are the run's own now


def test_not_even_force_takes_another_model(stopped: Path) -> None:
    with pytest.raises(Invalid, match="does not fit this model"):
        runner.proceed(stopped, ["model=mlp"], force=True)
    with pytest.raises(Invalid, match="6 clients, and now there are 5"):
        runner.proceed(stopped, ["partition.clients=5"], force=True)


@dataclass(frozen=True, kw_only=True)
class Remembering:
    """Local training that mixes in what the client sent last time."""

    inner: LocalTraining

    @property
    def work(self) -> Work:
        return self.inner.work

    def init(self, start: Tree) -> Tree:
        return {"last": start["params"], "visits": torch.zeros((), dtype=torch.int64)}

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        return self.inner.begin(task, message, memory)

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        return self.inner.step(task, carry, batch, message, memory)

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        reply, _ = self.inner.end(task, carry, message, memory)
        mixed = tree.map_leaves(lambda new, old: 0.7 * new + 0.3 * old, reply["model"]["params"], memory["last"])
        reply = {**reply, "model": {**reply["model"], "params": mixed}}
        return reply, {"last": mixed, "visits": memory["visits"] + 1}


@dataclass(frozen=True, kw_only=True)
class LeastLoss:
    """Half of the clients: never heard of first, then those with the least loss."""

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        losses = np.where(np.isnan(pool.losses), -1.0, pool.losses)[pool.candidates]
        return np.sort(pool.candidates[np.argsort(losses, kind="stable")[: len(pool) // 2]])


def remembering(**common: Unpack[Common]) -> Algorithm:
    """An algorithm whose every round depends on client memories and on the losses reported before."""
    algorithm = averaged(**common)
    assert isinstance(algorithm.client, LocalTraining)
    return dataclasses.replace(algorithm, client=Remembering(inner=algorithm.client), selection=LeastLoss())


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_memories_and_reported_losses_survive_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    monkeypatch.setattr(catalogue.algorithms, "names", lambda: ["remembering"])
    monkeypatch.setattr(catalogue.algorithms, "recipe", lambda name: remembering)
    overrides = ("rounds=6", "algorithm=remembering", f"engine.lane={lane}", "model={name='mlp', hidden=[8]}")
    whole = run(tmp_path, *overrides, folder=tmp_path / "whole")
    for at in (1, 4):
        stopped = tmp_path / f"stopped-{at}"
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, *overrides, folder=stopped, watch=stop_after(at))
        runner.proceed(stopped)
        assert whole.folder is not None
        newest = [checkpoint.generations(folder / "checkpoints")[-1] for folder in (whole.folder, stopped)]
        for name in ("server.safetensors", "memory.safetensors", "losses.safetensors", "manifest.json"):
            assert (newest[0] / name).read_bytes() == (newest[1] / name).read_bytes()
        assert (whole.folder / "metrics.jsonl").read_bytes() == (stopped / "metrics.jsonl").read_bytes()
    saved = checkpoint.load(newest[0])
    assert (
        saved.trees["memory"]["client"]["visits"].tolist() != [0] * 6
        and len({tuple(r["cohort"]) for r in whole.history}) > 1
    )


def test_one_client_alone_trains(tmp_path: Path) -> None:
    found = run(tmp_path, "partition.clients=1", "rounds=2")
    assert [row["weights"] for row in found.history] == [[1.0], [1.0]]
    assert found.history[1]["train_loss"] < found.history[0]["train_loss"]


def test_harmless_settings_may_change(stopped: Path, finished: Result) -> None:
    found = runner.proceed(stopped, ["rounds=4", "checkpoint.every=3", "checkpoint.keep=1"])
    assert len(found.history) == 4
    stored = config.load(stopped / "config.toml")
    assert (stored.rounds, stored.checkpoint.every, stored.checkpoint.keep) == (4, 3, 1)
    with pytest.raises(Invalid, match="4 rounds are finished"):
        runner.proceed(stopped, ["rounds=3"])


def test_a_full_disk_stops_the_run_with_the_old_checkpoint_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run(tmp_path, folder=tmp_path / "undisturbed")
    folder, write = tmp_path / "full", disk.write

    def full(fd: int, data: Any) -> int:
        if len(checkpoint.generations(folder / "checkpoints")) == 2 and len(data) > 2000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", full)
        with pytest.raises(CheckpointError, match=r"No space left.*free"):
            run(tmp_path, folder=folder)
    saved = checkpoint.load_latest(folder / "checkpoints")
    assert saved is not None and saved.round == 2
    runner.proceed(folder)
    for file in ("metrics.jsonl", "model.safetensors"):
        assert undisturbed.folder is not None
        assert (folder / file).read_bytes() == (undisturbed.folder / file).read_bytes()


def test_secrets_do_not_get_into_the_folder(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="data_dir"):
        run(tmp_path / "runs", "data_dir=https://user:hunter2@host/data")
    run(tmp_path, "rounds=1", "name=one")
    with pytest.raises(Invalid, match="data_dir"):
        runner.proceed(tmp_path / "one", ["rounds=2", "data_dir=https://user:hunter2@host/data"])
    assert not list((tmp_path).rglob("*hunter2*"))
    assert all("hunter2" not in file.read_text(errors="ignore") for file in tmp_path.rglob("*") if file.is_file())


def test_evaluation_sees_the_whole_test_set(finished: Result) -> None:
    assert finished.folder is not None
    experiment = assembly.assemble(config.load(finished.folder / "config.toml"))
    assert experiment.federation.test is not None and len(experiment.federation.test.y) == 359
    engine = experiment.engine
    assert evaluation.evaluate(engine.task, engine.start(), engine.store("test")).rows == 359
