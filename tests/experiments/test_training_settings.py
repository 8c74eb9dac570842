"""Options of local training in configs: horizons from the run's rounds, exact resumes, lanes, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from declared import COMBINED
from safetensors.torch import load_file

from consilience.algorithms.fedavg import fedavg
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.experiments import runner
from consilience.experiments.config.config import Config, from_table
from consilience.runs.folder import RunFolder
from consilience.runs.toml_text import loads

TABLE: dict[str, Any] = {
    "rounds": 6,
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 4, "alpha": 0.5},
    "model": {"name": "cnn", "hidden": 8},
    "engine": {"device": "cpu", "lane": "batched"},
    "threads": 1,
}


def config(rounds: int = 6, **algorithm: Any) -> Config:
    return from_table({**TABLE, "rounds": rounds, "algorithm": {"name": "fedavg", **algorithm}})


def schedule(found: Config, key: str = "lr_schedule") -> Any:
    return found.table()["algorithm"][key]


def test_a_schedule_lasts_as_long_as_the_run_unless_it_says_otherwise() -> None:
    assert schedule(config(lr_schedule="cosine")) == {"name": "cosine", "horizon": 6, "floor": 0.0}
    assert schedule(config(lr_schedule={"name": "linear", "horizon": 9}))["horizon"] == 9
    warm = schedule(config(lr_schedule={"name": "warm_up", "length": 2, "then": "cosine"}))
    assert warm["then"]["horizon"] == 4  # what the warm-up leaves
    assert schedule(config(server_lr_schedule="linear"), "server_lr_schedule")["horizon"] == 6
    with pytest.raises(Invalid, match=r"algorithm.lr_schedule_in_round.horizon is missing"):
        config(lr_schedule_in_round="cosine")
    with pytest.raises(Invalid, match=r"algorithm.lr_schedule.then: the warm-up takes all rounds"):
        config(lr_schedule={"name": "warm_up", "length": 6, "then": "cosine"})
    with pytest.raises(Invalid, match=r"algorithm.lr_schedule = 'cosinus' is not one of cosine"):
        config(lr_schedule="cosinus")


def test_rounds_without_a_rate_are_refused() -> None:
    with pytest.raises(Invalid, match=r"the learning rate of Cosine.* is 0 from round 5 on"):
        config(lr_schedule={"name": "cosine", "horizon": 4})
    assert config(lr_schedule={"name": "cosine", "horizon": 4, "floor": 0.1}).rounds == 6


def test_a_config_is_read_back_as_it_was() -> None:
    own = {"name": "rmsprop", "lr": 0.02, "alpha": 0.9, "weight_decay": 0.1}
    given = {key: value for key, value in COMBINED.items() if key not in ("lr", "weight_decay")}
    found = config(**{**given, "optimiser": own})
    again = from_table(loads(found.toml()))
    assert again == found and again.algorithm.built == found.algorithm.built


def test_more_rounds_keep_the_horizon_and_are_refused_where_nothing_would_be_learned(tmp_path: Path) -> None:
    runner.execute(config(2, lr=0.1, batch_size=64, epochs=1, lr_schedule="cosine"), folder=tmp_path / "run")
    with pytest.raises(Invalid, match=r"rounds = 4, but the learning rate of Cosine\(horizon=2, floor=0.0\) is 0"):
        runner.proceed(tmp_path / "run", ["rounds=4"])
    with pytest.raises(Invalid, match=r"algorithm\.lr_schedule\.horizon: 2 -> 4"):
        runner.proceed(tmp_path / "run", ["rounds=4", "algorithm.lr_schedule.horizon=4"])
    runner.proceed(tmp_path / "run", ["rounds=3", "algorithm.lr_schedule.horizon=4"], force=True)
    assert "horizon: 2 -> 4" in str(RunFolder.open(tmp_path / "run").facts()["forced"])


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = config(4, **{**COMBINED, "batch_size": 64, "epochs": 1})
    runner.execute(whole, folder=tmp_path / "whole")
    with runner.start(whole, folder=tmp_path / "killed") as live:
        for observation in live.observations():
            if observation.round.number == 2:
                break
    runner.proceed(tmp_path / "killed")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert RunFolder.open(tmp_path / "whole").rows().rows == RunFolder.open(tmp_path / "killed").rows().rows


def test_lanes_agree_when_steps_are_traced() -> None:
    """Ten epochs: more steps than it takes to be traced."""
    algorithm = fedavg(**{**COMBINED, "epochs": 10, "lr": 0.01})
    models = [
        list(run(algorithm, tiny.engine(tiny.plain_convnet, lane=lane), rounds=2, seed=3))[-1].model
        for lane in ("serial", "batched", "streams", "batched-matmul")
    ]
    assert all(tiny.gap(models[0], other) < 1e-8 for other in models[1:])
