"""Early stopping in a deployment: clients hold rows back and report sums; the server decides as a simulation does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from consilience.core.rounds import run
from consilience.data.validation import held_back_at_home
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments import runner
from consilience.experiments.config.config import load as read
from consilience.experiments.evaluation import evaluate
from consilience.experiments.stopping import PREFIX, best_so_far
from consilience.flower.deploy.settings import load
from consilience.flower.deploy.sources import source_of
from consilience.runs.folder import RunFolder
from consilience.wire import arrays

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from flower.deploy.test_serving import CLIENTS, SECRET, an_app, grid_for, served

from consilience.flower.deploy.serving import CONNECTION, serve

STOPS = "validation.share=0.3 validation.patience=2 rounds=20 algorithm.lr=0.5 validation.metric="


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTION, "loopback")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def simulated(app: Path, settings: str) -> tuple[list[float], Any, Any]:
    """(the validation values, the rule after them, the best model) of the same federation in one process."""
    config = load(app, overrides=settings.split())
    source = source_of(app, config)
    federation = source.held(np.arange(CLIENTS), {})
    engine = Vectorised(source.task, federation, dtype="float64", lane="serial", device="cpu")
    progress = best_so_far(config.validation, source.task)
    assert progress is not None
    values, best = [], None
    for done in run(config.build_algorithm(), engine, rounds=config.rounds, seed=config.seed):
        value = evaluate(engine.task, done.model, engine.store("validation"))[progress.metric.key]
        values.append(value)
        if progress.see({"round": done.number, PREFIX + progress.metric.key: value}):
            best = done.model
        if progress.ends:
            break
    return values, progress, best


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_a_deployment_stops_where_the_simulation_does_and_keeps_its_model(metric: str, tmp_path: Path) -> None:
    app = an_app(tmp_path / "app", "fedavg")
    values, progress, best = simulated(app, STOPS + metric)
    assert 2 < len(values) < 20, "this setting is to stop early"
    folder = served(app, tmp_path / "runs", settings=STOPS + metric)
    found = rows(folder)
    assert [row[PREFIX + metric] for row in found] == pytest.approx(values, rel=1e-13)
    facts = RunFolder.open(folder).facts()
    assert (facts["best"]["round"], facts["stopped_early"]) == (progress.round, len(values))
    stored = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    assert arrays.digest(stored) == arrays.digest({**best["params"], **best["buffers"]})


def test_it_continues_after_a_crash_and_with_secure_sums(tmp_path: Path) -> None:
    app = an_app(tmp_path / "app", "fedavg")
    whole = served(app, tmp_path / "whole", settings=f"{SECRET} {STOPS}loss")
    served(app, tmp_path / "again", settings=f"{SECRET} {STOPS}loss rounds=2")
    resumed = served(app, tmp_path / "again", settings=f"{SECRET} {STOPS}loss")
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert RunFolder.open(resumed).facts()["stopped_early"] == RunFolder.open(whole).facts()["stopped_early"]


def test_a_validation_is_one_question_to_every_client(tmp_path: Path) -> None:
    app = an_app(tmp_path / "app", "fedavg")
    given = {"runs": str(tmp_path / "runs"), "settings": "validation.share=0.3 rounds=1 evaluation.every=0"}
    grid = grid_for(app, **given)
    serve(grid, app, given)
    assert grid.kinds.count("evaluate") == CLIENTS, "one validation, no test"


def test_a_client_holds_the_same_rows_back_wherever_it_is(tmp_path: Path) -> None:
    app = an_app(tmp_path / "app", "fedavg")
    source = source_of(app, load(app))
    everyone = source.held(np.arange(CLIENTS), {})
    together = held_back_at_home(everyone, np.arange(CLIENTS), share=0.3, seed=5)
    for client in range(CLIENTS):
        alone = held_back_at_home(everyone.among(np.array([client])), np.array([client]), share=0.3, seed=5)
        for mine, ours in ((alone.train, together.train), (alone.validation, together.validation)):
            assert mine is not None and ours is not None
            assert (mine.of(0)[0] == ours.of(client)[0]).all() and (mine.of(0)[1] == ours.of(client)[1]).all()
        held, kept = alone.validation.of(0)[0], alone.train.of(0)[0]
        assert len(held) + len(kept) == int(everyone.train.sizes[client])
        assert not (held[:, None] == kept[None]).all(-1).any(), "nobody trains on them"
    small = [held_back_at_home(everyone.among(np.array([0])), np.array([k]), share=0.01, seed=5) for k in range(400)]
    taken = sum(len(one.validation.y) for one in small)  # type: ignore[union-attr]
    assert taken == pytest.approx(400 * 0.01 * len(everyone.train.of(0)[1]), rel=0.5), "rounded up now and then"


def test_a_deployment_of_named_data_has_the_rows_and_bits_of_the_simulation(tmp_path: Path) -> None:
    app = an_app(tmp_path / "app", "fedavg")
    (app / "federation.py").unlink()
    settings = """
rounds = 20
threads = 1
data = { name = "digits" }
partition = { name = "iid", clients = 3 }
model = { name = "mlp" }
algorithm = { name = "fedavg", lr = 0.5, epochs = 1, batch_size = 8, selection = "everyone" }
engine = { dtype = "float64", device = "cpu", lane = "serial" }
validation = { share = 0.3, patience = 1 }
"""
    deployed = f'name = "there"\n{settings}\ndeploy = {{ clients = {CLIENTS}, deadline = 5, wait = 0.3 }}\n'
    (app / "config.toml").write_text(deployed)
    there = served(app, tmp_path / "runs")
    (tmp_path / "here.toml").write_text(settings)
    here = runner.execute(read(tmp_path / "here.toml"), folder=tmp_path / "here").folder
    assert here is not None and len(rows(there)) < 20
    keys = [key for key in rows(here)[0] if key.startswith(PREFIX)]
    for mine, ours in zip(rows(there), rows(here), strict=True):
        assert {key: mine[key] for key in keys} == {key: ours[key] for key in keys}
    assert (there / "model.safetensors").read_bytes() == (here / "model.safetensors").read_bytes()
