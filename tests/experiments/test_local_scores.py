"""The accuracy of clients' own models: after their training, before the server merges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import consilience as cs
from consilience.core import tree
from consilience.core.rounds import run
from consilience.experiments import runner
from consilience.experiments.config import config
from consilience.experiments.record import Observer
from consilience.selection import Uniform

pytestmark = pytest.mark.usefixtures("untraced")


def observed(**options: Any) -> list[Any]:
    engine = tiny.engine(tiny.convnet)
    settings = {"every": 1, "rounds": 3, "local": True, **options}
    observer = Observer(task=engine.task, test=engine.store("test"), **settings)
    rounds = run(cs.fedavg(lr=0.2, batch_size=4, selection=Uniform(count=3)), engine, rounds=3, seed=2)
    return list(observer.watch(rounds, engine.start()))


def test_every_client_of_the_cohort_is_tested_on_all_test_rows() -> None:
    data = tiny.federation()
    assert data.test is not None
    found = observed()
    for one in found:
        accuracies, losses = [], []
        for place in range(3):
            module = cs.Task(tiny.convnet().double()).trained(tree.rows(one.round.cohort.reply["model"], place))
            output = module(data.test.x).detach()
            accuracies.append(float((output.argmax(1) == data.test.y).double().mean()))
            losses.append(float(torch.nn.functional.cross_entropy(output, data.test.y)))
        assert one.row["local_accuracy_mean"] == pytest.approx(np.mean(accuracies), abs=1e-12)
        assert one.row["local_accuracy_worst_tenth"] == pytest.approx(min(accuracies), abs=1e-12)
        assert one.row["local_accuracy_spread"] == pytest.approx(np.std(accuracies), abs=1e-12)
        assert one.row["local_loss"] == pytest.approx(np.mean(losses), rel=1e-12)
    assert found[-1].row["local_loss"] != found[-1].row["loss"]


def test_rounds_without_a_test_say_nothing_and_unasked_rows_have_no_such_field() -> None:
    tested = observed(every=2)
    assert [one.row["local_accuracy_mean"] is None for one in tested] == [True, False, False]  # the last one always
    assert tested[0].row["local_loss"] is None
    assert not [name for name in observed(local=False)[-1].row if name.startswith("local")]


def test_the_config_asks_for_it(tmp_path: Path) -> None:
    overrides = ["rounds=2", "evaluation.local=true", "partition.clients=3", f"runs={tmp_path}", "engine.lane=serial"]
    settings = config.load(None, [*overrides, "algorithm=fedavg", "model.hidden=[8]", "threads=1"])
    history = runner.execute(settings).history
    assert all(0 < row["local_accuracy_mean"] <= 1 for row in history)


def test_python_asks_for_it() -> None:
    options: Any = {"rounds": 1, "evaluate_local": True, "progress": False, "dtype": "float64"}
    result = cs.train(tiny.mlp().double(), tiny.federation(), cs.fedavg(), **options)
    assert result.history[0]["local_accuracy_mean"] is not None
