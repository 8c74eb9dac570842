"""Every algorithm through real Flower records equals the vectorised engine, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from declared import CLIENTS, COMBINED, build, model_of, representatives

from consilience.algorithms.fedavg import fedavg
from consilience.core.rounds import Round, run
from consilience.environments.environment import Environment
from consilience.task.task import Task

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from flower_loopback import Loopback, apps

from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments.client_tests import personal_test
from consilience.flower.engine.engine import FlowerEngine

SHARES = ([3], [0, 4], [1, 2])  # five clients on three nodes
ENVIRONMENT = Environment(stragglers=0.4, communication=0.8)
LONG = {"fedgen": pytest.mark.slow}  # its server trains a generator
# one recipe of each kind: two of a kind send and keep the same trees up to numbers; `centralised` has no clients apart
NAMES = [pytest.param(name, marks=LONG.get(name, ())) for name in representatives() if name != "centralised"]


def task_for(name: str) -> Task:
    return Task(model_of(name, "convnet")())


def rounds_of(name: str, engine: Any, rounds: int = 2) -> list[Round]:
    return list(run(build(name), engine, rounds=rounds, seed=5))


def deployed(name: str, **settings: Any) -> FlowerEngine:
    algorithm, federation = build(name), tiny.federation()
    grid = Loopback(apps(algorithm, lambda: task_for(name), federation, SHARES))
    options = {"environment": ENVIRONMENT, "dtype": "float64", **settings}
    engine = FlowerEngine(grid, task_for(name), algorithm, clients=CLIENTS, run="a-run", **options)
    engine.meet()
    return engine


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("name", NAMES)
def test_through_flower_records_is_vectorised(name: str) -> None:
    # a private server refuses stragglers, who depend on who else takes part
    environment = Environment(communication=0.8) if name == "dp_fedavg" else ENVIRONMENT
    settings = {"environment": environment, "dtype": "float64"}
    here = rounds_of(name, Vectorised(task_for(name), tiny.federation(), **settings, lane="serial", device="cpu"))
    there = rounds_of(name, deployed(name, **settings))
    for mine, theirs in zip(here, there, strict=True):
        assert tiny.same(mine.model, theirs.model)
        assert tiny.same(mine.snapshot.server, theirs.snapshot.server)
        assert tiny.same(mine.cohort.reply, theirs.cohort.reply)
        assert mine.cohort.ids.tolist() == theirs.cohort.ids.tolist()
        assert mine.cohort.counts == theirs.cohort.counts
        assert (mine.bytes_up, mine.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        assert torch.equal(mine.cohort.examples, theirs.cohort.examples)


@pytest.mark.usefixtures("untraced")
def test_every_option_of_local_training_goes_through_flower() -> None:
    algorithm, data = fedavg(**COMBINED), tiny.federation()
    grid = Loopback(apps(algorithm, lambda: task_for("fedavg"), data, SHARES))
    there = FlowerEngine(grid, task_for("fedavg"), algorithm, clients=CLIENTS, run="a-run", dtype="float64")
    there.meet()
    here = Vectorised(task_for("fedavg"), data, dtype="float64", lane="serial", device="cpu")
    for mine, theirs in zip(*(run(algorithm, engine, rounds=3, seed=5) for engine in (here, there)), strict=True):
        assert tiny.same(mine.model, theirs.model) and tiny.same(mine.snapshot.server, theirs.snapshot.server)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("name", ["fedper", "ditto"])
def test_clients_test_their_own_models_through_flower_as_in_process(name: str) -> None:
    here = Vectorised(task_for(name), tiny.federation(), dtype="float64", lane="serial", device="cpu")
    there = deployed(name, environment=Environment())
    found = []
    for engine in (here, there):
        last = rounds_of(name, engine)[-1]
        test = personal_test(build(name), engine)
        assert test is not None
        found.append(test(last.snapshot.server))
    assert found[0].values.tolist() == found[1].values.tolist() and found[0].loss.tolist() == found[1].loss.tolist()
