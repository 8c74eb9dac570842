"""Validation rows come from the clients' training rows, are the same for all methods, and are never test rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from consilience.core.settings import Invalid
from consilience.data.dataset import Dataset
from consilience.data.federate import federate
from consilience.data.partition.iid import Iid
from consilience.data.validation import validated
from consilience.experiments import runner
from consilience.experiments.assembly import read_data, spread
from consilience.experiments.config import config
from consilience.flower.deploy.settings import from_given

SMALL = ["partition.clients=5", "model=logistic", "engine.lane=serial", "engine.device=cpu", "threads=1", "rounds=2"]
SMALL += ["algorithm=fedavg", "algorithm.epochs=1"]


def numbered(rows: int) -> Dataset:
    """Rows that are told apart by their only feature; test rows are negative."""
    x = torch.arange(rows, dtype=torch.float32)[:, None]
    labels = torch.arange(rows) % 4
    return Dataset(name="numbered", x=x, y=labels, test_x=-1 - x[:8], test_y=labels[:8], classes=4)


def test_each_client_gives_its_share_and_no_row_is_lost_or_used_twice() -> None:
    federation, parts = federate(numbered(100), Iid(clients=5), seed=3)
    found, training = validated(federation, parts, share=0.2, seed=3)
    assert found.test is not None
    assert found.test.sizes.tolist() == [4] * 5 and found.train.sizes.tolist() == [16] * 5
    for k in range(5):
        before, after = set(federation.train.of(k)[0].flatten().tolist()), found.train.of(k)[0].flatten().tolist()
        held = found.test.of(k)[0].flatten().tolist()
        assert set(after) | set(held) == before and len(after) + len(held) == len(before)
        assert training[k].tolist() == after  # the features are the rows' numbers
        assert min(held) >= 0  # no test row
        mine, taken = (torch.bincount(rows.of(k)[1], minlength=4) for rows in (federation.train, found.test))
        assert ((taken - 0.2 * mine).abs() < 1).all()  # label by label


def test_the_seed_decides_and_the_method_does_not(tmp_path: Path) -> None:
    def held(*overrides: str) -> torch.Tensor:
        settings = config.load(None, [*SMALL, "evaluation.validation=0.25", *overrides])
        federation, _ = spread(settings, read_data(settings))
        assert federation.test is not None
        return federation.test.x

    assert torch.equal(held("algorithm=fedavg"), held("algorithm=ditto", "algorithm.lr=0.3"))
    assert not torch.equal(held("seed=1"), held("seed=2"))


def test_no_validation_row_is_a_test_row_of_any_seed() -> None:
    plain = config.load(None, SMALL)
    data = read_data(plain)
    tests = {row.numpy().tobytes() for row in data.test_x}
    trains = {row.numpy().tobytes() for row in data.x}
    for seed in (0, 1, 1000):
        settings = config.load(None, [*SMALL, "evaluation.validation=0.2", f"seed={seed}"])
        federation, _ = spread(settings, data)
        assert federation.test is not None
        rows = {row.numpy().tobytes() for row in federation.test.x}
        assert rows <= trains and not rows & (tests - trains)


def test_a_client_keeps_a_training_row_and_too_small_a_share_is_refused() -> None:
    federation, parts = federate(numbered(6), Iid(clients=5), seed=0)
    found, _ = validated(federation, parts, share=0.9, seed=0)
    assert (found.train.sizes >= 1).all()
    federation, parts = federate(numbered(5), Iid(clients=5), seed=0)
    with pytest.raises(Invalid, match=r"evaluation.validation = 0.5 leaves no client a validation row"):
        validated(federation, parts, share=0.5, seed=0)


def test_a_run_with_validation_is_an_ordinary_run_that_is_resumed_exactly(tmp_path: Path) -> None:
    settings = config.load(None, [*SMALL, "evaluation.validation=0.2"])
    whole = runner.execute(settings, folder=tmp_path / "whole")
    plain = runner.execute(config.load(None, SMALL), folder=tmp_path / "plain")
    assert whole.history != plain.history
    runner.execute(config.load(None, [*SMALL, "evaluation.validation=0.2", "rounds=1"]), folder=tmp_path / "cut")
    resumed = runner.proceed(tmp_path / "cut", ["rounds=2"])
    assert [row["accuracy"] for row in resumed.history] == [row["accuracy"] for row in whole.history]
    assert np.isfinite(whole.history[-1]["accuracy"])
    with pytest.raises(Invalid, match=r"evaluation.validation"):
        runner.proceed(tmp_path / "cut", ["evaluation.validation=0.3", "rounds=3"])


def test_a_deployment_whose_clients_bring_their_rows_refuses_it() -> None:
    with pytest.raises(Invalid, match=r"evaluation.validation is not supported with federation.py"):
        from_given({"evaluation": {"validation": 0.2}}, own=True)
