"""Personal layers and term checks in every recipe, also where its client is a rule inside another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tiny
import torch.nn.functional as F
from declared import build, model_of
from torch import Tensor, nn

import consilience as cs
from consilience import algorithms
from consilience.client.personal_layers import Head, Named
from consilience.client.terms.term import Context
from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.plans import Batch
from consilience.core.rounds import Round, run
from consilience.core.settings import Invalid, options_of
from consilience.core.tree import Tree
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments import assembly
from consilience.experiments.client_tests import personal_test
from consilience.experiments.config.config import from_table
from consilience.experiments.model_checks import try_client
from consilience.task.task import Task
from consilience.training import train

pytestmark = pytest.mark.usefixtures("untraced")

CLIENTS = len(tiny.SIZES)
COMMON: dict[str, Any] = {"lr": 0.2, "batch_size": 4, "personal_layers": Head()}


# --- personal layers -------------------------------------------------------------------------------------------------


def finished(algorithm: Algorithm, engine: Vectorised, rounds: int = 3) -> Round:
    *_, last = run(algorithm, engine, rounds=rounds, seed=1)
    return last


def own_model(name: str, last: Round, client: int) -> dict[str, Tensor]:
    """By hand: the parameters that a client uses after the last round."""
    memory = tree.rows(last.snapshot.memory["client"], client)
    if name == "ditto":
        return memory["own"]["params"]
    shared = last.model["params"]
    if name == "ifca":
        shared = tree.rows(last.snapshot.server["groups"]["model"]["params"], int(memory["cluster"]))
    return {**shared, **memory["personal_layers"]["params"]}


@pytest.mark.parametrize("lane", ["serial", "batched"])
@pytest.mark.parametrize("name", ["qffl", "afl", "dr_fedavg", "fedfa", "ditto", "ifca", "fedgen", "fedprox", "fedavg"])
def test_each_client_is_judged_by_the_model_with_its_own_layers(name: str, lane: str) -> None:
    given = {"fedprox": {"report_gamma": True}, "fedgen": {"personal_layers": Named(patterns=("1.*",))}}  # not its head
    algorithm, engine = getattr(cs, name)(**{**COMMON, **given.get(name, {})}), tiny.engine(lane=lane)
    test, last = personal_test(algorithm, engine), finished(algorithm, engine)
    assert test is not None, f"{name} with personal layers has personal models"
    found = test(last.snapshot.server)
    for client in range(CLIENTS):
        module = tiny.mlp().double()
        module.load_state_dict(own_model(name, last, client))
        x, y = tiny.federation().test.of(client)  # type: ignore[union-attr]
        output = module(x).detach()
        assert found.values[client] == pytest.approx(float((output.argmax(1) == y).double().mean()), abs=1e-12)
        assert found.loss[client] == pytest.approx(float(F.cross_entropy(output, y)), abs=1e-12)
    kept = "1.bias" if name == "fedgen" else "3.bias"
    values = {tuple(own_model(name, last, client)[kept].tolist()) for client in range(CLIENTS)}
    assert len(values) == CLIENTS, "the clients' layers must differ, or the test shows nothing"


def test_the_record_of_a_run_has_their_rows() -> None:
    rows = [
        train(
            tiny.mlp().double(), tiny.federation(), recipe(**COMMON), rounds=1, dtype="float64", progress=False
        ).history[-1]
        for recipe in (cs.qffl, cs.fedavg)
    ]
    personal = [sorted(key for key in row if key.startswith("personal_")) for row in rows]
    assert personal[0] == personal[1] and len(personal[0]) > 2


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_the_loss_at_start_is_that_of_the_model_with_the_clients_own_layers(lane: str) -> None:
    """Not of the server's head, which nobody trains."""
    engine = tiny.engine(lane=lane)
    first, second = run(cs.dr_fedavg(**COMMON), engine, rounds=2, seed=1)
    memory = first.snapshot.memory["client"]["personal_layers"]["params"]
    for client in range(CLIENTS):
        model = {"params": {**first.model["params"], **tree.rows(memory, client)}, "buffers": {}}
        x, y = engine.store("train").of(client)
        expected = F.cross_entropy(engine.task.apply(model, x, train=False)[0], y)
        assert float(second.cohort.reply["start_loss"][client]) == pytest.approx(float(expected), rel=1e-12)
    with_servers_head = [
        float(F.cross_entropy(engine.task.apply(first.model, *engine.store("train").of(k)[:1], train=False)[0], y))
        for k, y in ((k, engine.store("train").of(k)[1]) for k in range(CLIENTS))
    ]
    assert not np.allclose(second.cohort.reply["start_loss"], with_servers_head, rtol=1e-3)


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_the_accuracy_at_the_end_is_that_of_the_model_with_the_clients_own_layers(lane: str) -> None:
    engine = tiny.engine(lane=lane)
    last = finished(cs.fedfa(**{**COMMON, "lr": 1.0}, epochs=10), engine, rounds=2)
    memory = last.snapshot.memory["client"]["personal_layers"]["params"]
    counts: dict[str, list[int]] = {"own": [], "server's": []}
    for client in range(CLIENTS):
        sent = tree.rows(last.cohort.reply["model"]["params"], client)
        x, y = engine.store("train").of(client)
        heads = {"own": tree.rows(memory, client), "server's": {n: last.model["params"][n] for n in memory}}
        for whose, head in heads.items():
            output, _ = engine.task.apply({"params": {**sent, **head}, "buffers": {}}, x, train=False)
            counts[whose].append(int((output.argmax(1) == y).sum()))
    assert last.cohort.reply["correct"].tolist() == counts["own"]
    assert counts["own"] != counts["server's"], "the heads must differ in what they decide, or the test shows nothing"


# --- terms -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Featured:
    """A term that needs a method which no tiny model has."""

    def check_against(self, task: Task) -> None:
        if not callable(getattr(task.module, "landmarks", None)):
            raise Invalid(f"{type(task.module).__name__} has no landmarks(x) method, which Featured looks at")

    def __call__(self, params: Tree, context: Context, batch: Batch) -> Tensor:
        return 0.0 * next(iter(params.values())).sum()


WITHOUT_TERMS = {
    "fedaf": "its clients send synthetic rows, not models",
    "feddm": "its clients send synthetic rows, not models",
    "fednova": "it knows how steps add up with FedProx's term alone",
    "duw_fednova": "it scales plain steps of the loss",
}
WITH_TERMS = [name for name in algorithms.names() if "terms" in options_of(algorithms.recipe(name))]


@pytest.mark.parametrize("name", WITH_TERMS)
def test_a_term_that_does_not_fit_the_model_is_refused_before_training(name: str) -> None:
    if name in WITHOUT_TERMS:
        with pytest.raises(Invalid, match=r"terms|Featured"):
            build(name, terms=(Featured(),))
        return
    algorithm, task = build(name, terms=(Featured(),)), Task(model_of(name, "mlp")())
    with pytest.raises(Invalid, match=r"has no landmarks\(x\) method, which Featured looks at"):
        try_client(algorithm, task)
    task.module.landmarks = lambda x: x  # type: ignore[assignment, operator]
    try_client(algorithm, task)


def test_recipes_with_wrapped_clients_are_among_them() -> None:
    wrapped = {"qffl", "afl", "dr_fedavg", "fedfa", "ditto", "ifca", "fedgen", "local_only", "fedsiam_da"}
    assert wrapped <= set(WITH_TERMS) - set(WITHOUT_TERMS)
    assert set(WITHOUT_TERMS) <= set(WITH_TERMS)


@pytest.mark.parametrize("recipe", [cs.fedavg, cs.qffl, cs.ditto, cs.fedgen], ids=lambda recipe: recipe.__name__)
def test_train_refuses_it_before_the_first_step(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vectorised, "exchange", lambda *_, **__: pytest.fail("training had begun"))
    with pytest.raises(Invalid, match=r"algorithm: Sequential has no landmarks\(x\) method"):
        train(tiny.mlp().double(), tiny.federation(), recipe(terms=(Featured(),)), rounds=1, progress=False)


@pytest.mark.parametrize("name", ["moon", "qffl", "fedfa", "ditto", "ifca", "fedgen"])
def test_a_run_refuses_a_contrastive_term_without_features(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # every model of the zoo has features
    monkeypatch.setattr(assembly, "_model", lambda config, data, kind: bare)
    given = {} if name == "moon" else {"terms": [{"name": "contrastive"}], "memory": [{"name": "previous_model"}]}
    table = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "clients": 3},
        "algorithm": {"name": name, **given},
    }
    with pytest.raises(Invalid, match=r"algorithm: \w+ has no features\(x\) method, whose values Contrastive compares"):
        assembly.assemble(from_table(table))


@pytest.mark.parametrize("name", ["fedavg", "qffl", "ditto"])
def test_personal_layers_that_leave_nothing_to_share_are_refused_before_training(name: str) -> None:
    with pytest.raises(Invalid, match=r"keeps every parameter with the client"):
        try_client(getattr(cs, name)(personal_layers=Head(layers=2)), Task(tiny.mlp()))


def test_fedgens_own_term_needs_class_numbers() -> None:
    with pytest.raises(Invalid, match="needs one class number per row: regression has none"):
        try_client(cs.fedgen(), Task(tiny.mlp(), loss="squared_error"))
    try_client(cs.fedgen(), Task(tiny.mlp()))
