"""Validation rows, the best model and early stopping: by hand, after resumes, on Ray, from Python."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

import consilience as cs
from consilience.core.metrics import MetricRow
from consilience.core.settings import Invalid
from consilience.data.validation import held_back
from consilience.experiments import runner
from consilience.experiments.config.config import from_table
from consilience.experiments.retest import latest, retest
from consilience.experiments.stopping import BestSoFar, Validation
from consilience.runs.folder import RunFolder

TABLE: dict[str, Any] = {
    "rounds": 12,
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 5, "alpha": 0.5},
    "algorithm": {"name": "fedavg", "lr": 1.5, "batch_size": 32, "momentum": 0.9},
    "model": {"name": "mlp", "hidden": [8]},
    "engine": {"device": "cpu", "lane": "serial"},
    "threads": 1,
    "validation": {"share": 0.2, "patience": 2, "metric": "loss"},
}


def table(**changes: Any) -> dict[str, Any]:
    return {**TABLE, **changes}


def rows(values: list[float], key: str = "loss") -> list[dict[str, Any]]:
    return [{"round": n + 1, f"validation_{key}": value} for n, value in enumerate(values)]


def progress(values: list[float], better: str = "lower", **settings: Any) -> BestSoFar:
    metric = MetricRow(key="loss", title="loss", better=better)  # type: ignore[arg-type]
    return BestSoFar(Validation(share=0.5, **settings), metric, rows(values))


@pytest.mark.parametrize(
    ("values", "settings", "best", "waited", "ends"),
    [
        ([3, 2, 2, 2.5], {"patience": 2}, 2, 2, True),
        ([3, 2, 2, 1.5], {"patience": 2}, 4, 0, False),
        ([3, 2.95, 2.9, 2.8], {"patience": 3, "min_delta": 0.1}, 4, 0, False),  # 0.2 below the best, in small steps
        ([3, 2.95, 2.91], {"patience": 2, "min_delta": 0.1}, 1, 2, True),
        ([math.nan, 2, math.inf, math.nan], {"patience": 2}, 2, 2, True),
        ([3, 4, 5, 6], {}, 1, 3, False),
    ],
)
def test_the_rule_by_hand(values: list[float], settings: Any, best: int, waited: int, ends: bool) -> None:
    found = progress(values, **settings)
    assert (found.round, found.waited, found.ends) == (best, waited, ends)


def test_a_metric_that_should_be_high() -> None:
    found = progress([0.5, 0.7, 0.6], better="higher", patience=1)
    assert (found.round, found.value, found.ends) == (2, 0.7, True)


def test_rows_are_held_back_from_training_and_the_test_rows_stay() -> None:
    data = tiny.federation()
    parts = [torch.arange(int(size)).numpy() for size in data.train.sizes]
    reduced, held, kept = held_back(data, parts, share=0.3, seed=1)
    assert reduced.test is data.test
    for k, (size, left, own) in enumerate(zip(data.train.sizes, reduced.train.sizes, held.sizes)):
        assert int(left) + int(own) == int(size) and int(left) >= 1
        start, at = int(held.starts[k]), int(reduced.train.starts[k])
        mine = [*held.x[start : start + int(own)], *reduced.train.x[at : at + int(left)]]
        whole = data.train.x[int(data.train.starts[k]) : int(data.train.starts[k] + size)]
        assert sorted(float(x.sum()) for x in mine) == sorted(float(x.sum()) for x in whole)
        assert len(kept[k]) == int(left)
    again = held_back(data, parts, share=0.3, seed=1)[1]
    assert torch.equal(again.x, held.x) and not torch.equal(held_back(data, parts, share=0.3, seed=2)[1].x, held.x)


def whole(path: Path) -> Path:
    runner.execute(from_table(table()), folder=path)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole(tmp_path_factory.mktemp("runs") / "whole")


def test_a_run_stops_and_ends_with_its_best_model(finished: Path) -> None:
    folder = RunFolder.open(finished)
    history, facts = folder.rows().rows, folder.facts()
    losses = [row["validation_loss"] for row in history]
    best = min(range(len(losses)), key=losses.__getitem__) + 1
    assert len(history) == best + 2 < 12  # two more rounds without a better one
    assert facts["status"] == "finished" and facts["stopped_early"] == len(history)
    assert facts["best"] == {"round": best, "metric": "loss", "value": losses[best - 1]}
    manifest = json.loads((finished / "model.json").read_text())
    assert manifest["round"] == best
    assert history[-1]["accuracy"] is not None  # the last round is tested
    assert latest(finished, best=True)[1] == best and latest(finished)[1] == len(history)
    kept = {**latest(finished, best=True)[0].values["params"]}
    assert all(torch.equal(kept[name], value) for name, value in load_file(finished / "model.safetensors").items())
    chosen, last = retest(finished, best=True), retest(finished)
    assert (chosen.round, last.round) == (best, len(history))
    assert chosen.scores.values["loss"] == pytest.approx(history[best - 1]["loss"], rel=1e-12)
    assert last.scores.values["loss"] == pytest.approx(history[-1]["loss"], rel=1e-12)


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_run_that_was_killed_ends_the_same(finished: Path, tmp_path: Path, at: int) -> None:
    """Killed after round `at`, where only every second round has a checkpoint."""
    config = from_table(table(checkpoint={"every": 2, "keep": 1}))
    with runner.start(config, folder=tmp_path / "killed") as live:
        for observation in live.observations():
            if observation.round.number == at:
                break
    runner.proceed(tmp_path / "killed")
    one, other = RunFolder.open(finished), RunFolder.open(tmp_path / "killed")
    assert one.rows().rows == other.rows().rows
    assert one.facts()["best"] == other.facts()["best"]
    for name, value in load_file(finished / "model.safetensors").items():
        assert torch.equal(value, load_file(tmp_path / "killed" / "model.safetensors")[name])


def test_a_stopped_run_stays_stopped_and_more_patience_continues_it(finished: Path, tmp_path: Path) -> None:
    folder = whole(tmp_path / "again")
    before = len(RunFolder.open(folder).rows().rows)
    runner.proceed(folder)
    assert len(RunFolder.open(folder).rows().rows) == before
    runner.proceed(folder, ["validation.patience=20"])
    patient = tmp_path / "patient"
    runner.execute(from_table(table(validation={**TABLE["validation"], "patience": 20})), folder=patient)
    for name, value in load_file(patient / "model.safetensors").items():
        assert torch.equal(value, load_file(folder / "model.safetensors")[name])
    with pytest.raises(Invalid, match=r"validation\.share"):
        runner.proceed(folder, ["validation.share=0.3"])


def test_the_last_model_where_it_is_asked_for(finished: Path, tmp_path: Path) -> None:
    settings = {**TABLE["validation"], "export": "last"}
    runner.execute(from_table(table(validation=settings)), folder=tmp_path / "last")
    assert json.loads((tmp_path / "last" / "model.json").read_text())["round"] == len(
        RunFolder.open(finished).rows().rows
    )


def test_from_python() -> None:
    data = tiny.federation((30, 20, 10))
    chosen = cs.Validation(share=0.3, patience=2, metric="loss")
    result = cs.train(
        tiny.mlp().double(),
        data,
        cs.fedavg(lr=0.5),
        rounds=30,
        validation=chosen,
        progress=False,
        lane="serial",
        dtype="float64",
    )
    losses = [row["validation_loss"] for row in result.history]
    best = min(range(len(losses)), key=losses.__getitem__) + 1
    assert result.best == {"round": best, "metric": "loss", "value": losses[best - 1]}
    assert len(losses) == best + 2 or len(losses) == 30
    again = cs.train(
        tiny.mlp().double(), data, cs.fedavg(lr=0.5), rounds=best, progress=False, lane="serial", dtype="float64",
        validation=cs.Validation(share=0.3, export="last"),
    )  # fmt: skip
    assert tiny.gap(result.values, again.values) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"share": 1.5}, "validation.share = 1.5 is out of range"),
        ({"patience": 3}, "validation.patience = 3 has no effect with share = None"),
        ({"share": 0.2, "patience": 0}, "validation.patience = 0 is out of range"),
        ({"share": 0.2, "metric": "acuracy"}, "validation.metric = 'acuracy' is not one of loss, accuracy"),
        ({"share": 0.2, "export": "first"}, "is not one of best, last"),
    ],
)
def test_bad_settings_are_refused_before_training(settings: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid) as caught:
        runner.execute(from_table(table(validation=settings)), folder=tmp_path / "never")
    assert words in str(caught.value) and not (tmp_path / "never").exists()


def test_a_run_without_validation_has_no_best_model(tmp_path: Path) -> None:
    runner.execute(from_table({**table(), "rounds": 1, "validation": {}}), folder=tmp_path / "plain")
    assert "validation" not in (tmp_path / "plain" / "config.toml").read_text()
    with pytest.raises(Invalid, match="has no best model"):
        retest(tmp_path / "plain", best=True)
