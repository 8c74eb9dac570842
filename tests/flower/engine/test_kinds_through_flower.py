"""Every kind of task through Flower's records: the same bits as in one process, and the same metrics from clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kind_tasks
import numpy as np
import pytest
import tiny
import torch
from declared import build

from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments.client_tests import federated_test
from consilience.experiments.evaluation import evaluate
from consilience.experiments.model_checks import try_model

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from flower_loopback import Loopback, apps

from consilience.flower.deploy.settings import from_given
from consilience.flower.deploy.sources import OwnFederation
from consilience.flower.engine.engine import FlowerEngine

OPTIONS = {"dtype": "float64", "lane": "serial", "device": "cpu"}


def weighted(kind: str) -> Federation:
    """The kind's clients, whose rows have weights."""
    draw = torch.Generator().manual_seed(0)
    rows = kind_tasks.CASES[kind].rows
    clients = [(*rows(size, draw), torch.rand(size, generator=draw) + 0.1) for size in kind_tasks.SIZES]
    return Federation.from_clients(clients, client_tests=[rows(3, draw) for _ in clients])


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("kind", kind_tasks.CASES)
def test_a_kind_through_flower_is_the_same_kind(kind: str) -> None:
    federation, algorithm = weighted(kind), build("fedavg")

    def task() -> Task:
        return try_model(kind_tasks.task(kind), federation, "the model", "the data")

    here = Vectorised(task(), federation, **OPTIONS)
    grid = Loopback(apps(algorithm, task, federation, ([0, 3], [1, 2, 4])))
    there = FlowerEngine(grid, task(), algorithm, clients=len(federation), run="a-run", dtype="float64")
    there.meet()
    (mine,) = run(algorithm, here, rounds=1, seed=2)
    (theirs,) = run(algorithm, there, rounds=1, seed=2)
    assert tiny.same(mine.model, theirs.model)
    test = federated_test(there)
    assert test is not None
    found, central = test(theirs.model), evaluate(here.task, mine.model, here.test_rows)
    assert found is not None
    known = {key: value for key, value in central.values.items() if value is not None}
    assert {key: found.values[key] for key in known} == pytest.approx(known, rel=1e-9, abs=1e-12)
    assert found.clients.values == pytest.approx(central.clients.values, rel=1e-9, nan_ok=True)


APP = """
import torch
from torch import nn

def model():
    return nn.{model}

def data(client, node):
    draw = torch.Generator().manual_seed(client)
    {rows}
"""
PETS = "x = torch.randn(6, 2, generator=draw); return x, ['dog' if a > 0 else 'cat' for a in x[:, 0]]"
TWO = "x = torch.randn(6, 2, generator=draw); return x, x * 2, torch.ones(6)"
MASKS = "x = torch.randn(6, 1, 4, 4, generator=draw); return x, (x[:, 0] > 0).long()"


def own(tmp_path: Path, model: str, rows: str, **settings: Any) -> OwnFederation:
    (tmp_path / "federation.py").write_text(APP.format(model=model, rows=rows))
    deploy = settings.pop("deploy", {})
    given = {"algorithm": {"name": "fedavg"}, "deploy": {"clients": 2, **deploy}, **settings}
    return OwnFederation(tmp_path, from_given(given, own=True))


def test_an_app_of_ones_own_says_its_kind_in_the_config(tmp_path: Path) -> None:
    both = np.arange(2)
    source = own(tmp_path, "Conv2d(1, 2, 1)", MASKS, task={"kind": "dense"}, deploy={"classes": 2})
    assert source.task.kind.name == "dense" and source.task.metrics.main == "iou"
    source.held(both, {})
    with pytest.raises(Invalid, match=r"task.kind = 'dense' needs deploy.classes"):
        _ = own(tmp_path, "Conv2d(1, 2, 1)", MASKS, task={"kind": "dense"}).task
    held = own(tmp_path, "Linear(2, 2)", TWO, task={"outputs": 2}).held(both, {})
    assert held.train.weight is not None and held.test is None
    with pytest.raises(Invalid, match=r"a row has 2 targets, which the server must know: set task.outputs"):
        own(tmp_path, "Linear(2, 2)", TWO).held(both, {})
    named = own(tmp_path, "Linear(2, 2)", PETS, task={"labels": ["dog", "cat"]}, deploy={"classes": 2})
    federation = named.held(both, {})
    assert named.label_names == federation.label_names == ("dog", "cat")
    assert torch.equal(federation.train.y, (federation.train.x[:, 0] <= 0).long())
    with pytest.raises(Invalid, match="needs all clients' labels"):
        _ = own(tmp_path, "Linear(2, 2)", PETS, task={"class_weights": "balanced"}, deploy={"classes": 2}).task
