"""The ready ClientApp and a strategy, through Flower's real messages, give what the vectorised engine gives."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from declared import DECLARED, Declared, build, model_of
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'consilience[flower]'")

import flower_messages as fm

from consilience.core.rounds import run
from consilience.core.settings import options_of
from consilience.flower import client_app
from consilience.flower.strategies.catalogue import STRATEGIES
from consilience.flower.strategies.strategy import strategy
from consilience.selection import Everyone

pytestmark = pytest.mark.usefixtures("untraced")
LOCAL = {"lr": 0.05, "epochs": 1, "batch_size": 4}
ROUNDS = 3
# strategies whose clients do more than plain training, and some whose do not
NAMES = [name for name, entry in STRATEGIES.items() if entry.client != "any"] + ["FedAvg", "SimFedSwap"]


def contexts() -> dict[int, Any]:
    """node -> its Context, whose state lasts."""
    from flwr.app import Context, RecordDict

    return {
        node: Context(run_id=1, node_id=node, node_config={"partition-id": k}, state=RecordDict(), run_config={})
        for k, node in enumerate(fm.NODES)
    }


def rows_of(context: Any) -> Any:
    data, client = tiny.federation(), int(context.node_config["partition-id"])
    return data.train.of(client), data.test.of(client)


def options_for(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the strategy's, the client's): what the algorithm needs is told to the server alone."""
    recipe = STRATEGIES[name].recipe
    given = dict(DECLARED.get(recipe, Declared()).options)
    mine = {key: value for key, value in given.items() if key in STRATEGIES[name].options}
    if name == "QFFL":
        mine["lr"] = LOCAL["lr"]
    theirs = {key: value for key, value in given.items() if not isinstance(value, (int, float, str, bool))}
    return mine, {**theirs, **LOCAL}


def play(name: str, app: Any, mine: Any, start: dict[str, torch.Tensor], states: dict[int, Any]) -> Any:
    """Some rounds of training."""
    arrays = fm.record(start)
    for number in range(1, ROUNDS + 1):
        messages = fm.ask(mine, number, arrays)
        replies = [app(message, states[node]) for node, message in messages.items()]
        arrays, metrics = mine.aggregate_train(number, replies)
        assert arrays is not None, mine.refusals
        assert metrics["train-loss"] > 0
    return arrays


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_the_vectorised_engines(name: str) -> None:
    recipe = STRATEGIES[name].recipe
    model = model_of(recipe, "convnet" if name in ("FedAvg", "FedBN", "SimFedSwap") else "mlp")
    engine = tiny.engine(model)
    *_, last = run(build(recipe, selection=Everyone()), engine, rounds=ROUNDS, seed=5)
    mine_options, client_options = options_for(name)
    app = client_app(lambda: model().double(), rows_of, recipe, **client_options)
    got = play(name, app, strategy(name)(seed=5, **mine_options), model().double().state_dict(), contexts())
    expected = fm.state_dict(last.model)
    assert tiny.gap({key: fm.values_of(got)[key] for key in expected}, expected) <= 1e-12


def test_distances_that_clients_measure_from_their_own_past_reach_the_weights() -> None:
    """SimProx with previous_model="own" reads a number that the client's memory adds to the reply."""
    engine = tiny.engine(tiny.mlp)
    *_, last = run(build("simprox", selection=Everyone(), previous_model="own"), engine, rounds=ROUNDS, seed=5)
    app = client_app(lambda: tiny.mlp().double(), rows_of, "simprox", **LOCAL)
    mine = strategy("SimProx")(seed=5, previous_model="own")
    got = play("SimProx", app, mine, tiny.mlp().double().state_dict(), contexts())
    expected = fm.state_dict(last.model)
    assert tiny.gap({key: fm.values_of(got)[key] for key in expected}, expected) <= 1e-12
    assert torch.equal(mine.notes["weights"], last.notes["weights"])


def test_evaluation_is_by_the_clients_own_model_where_it_has_one() -> None:
    from flwr.app import ConfigRecord

    model, found = model_of("fedbn", "convnet"), {}
    for name in ("FedAvg", "FedBN"):
        app = client_app(lambda: model().double(), rows_of, STRATEGIES[name].recipe, **LOCAL)
        mine, states = strategy(name)(), contexts()
        arrays = play(name, app, mine, model().double().state_dict(), states)
        messages = mine.configure_evaluate(ROUNDS, arrays, ConfigRecord(), fm.Grid())
        replies = [app(message, states[message.metadata.dst_node_id]) for message in messages]
        found[name] = mine.aggregate_evaluate(ROUNDS, replies)
        assert 0 <= found[name]["accuracy"] <= 1 and "partition-id" not in found[name]
    recipe = build("fedbn", selection=Everyone())
    engine = tiny.engine(model)
    *_, last = run(recipe, engine, rounds=ROUNDS, seed=0)
    from consilience.core.algorithm import Plain
    from consilience.core.evaluate import Evaluate

    cohort = engine.exchange(
        Evaluate(rule=recipe.client),  # type: ignore[arg-type]
        Plain(),
        recipe.server.broadcast(last.snapshot.server, last.cohort.ids),
        last.cohort.ids,
        round=ROUNDS,
        seed=0,
    )
    expected = float(cohort.reply["loss"]["total"].sum() / cohort.reply["loss"]["count"].sum())
    assert found["FedBN"]["loss"] == pytest.approx(expected, rel=1e-12)
    assert found["FedBN"]["loss"] != found["FedAvg"]["loss"]


class Tied(nn.Module):
    """Two names for one parameter, a parameter that does not learn, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(36, 36), nn.Linear(36, 36)
        self.two.weight = self.one.weight
        self.head, self.scale = nn.Linear(36, 3), nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(torch.tanh(self.one(x.flatten(1)))) * self.scale)


@pytest.mark.parametrize("name", ["FedAvg", "Scaffold", "FedDyn"])
def test_tied_and_frozen_parameters_travel_under_all_their_names(name: str) -> None:
    def module() -> nn.Module:
        return tiny.seeded(Tied).double()

    recipe = STRATEGIES[name].recipe
    engine = tiny.engine(lambda: tiny.seeded(Tied))
    *_, last = run(build(recipe, selection=Everyone()), engine, rounds=ROUNDS, seed=0)
    app = client_app(module, rows_of, recipe, **LOCAL)
    got = fm.values_of(play(name, app, strategy(name)(), module().state_dict(), contexts()))
    assert set(got) == set(module().state_dict()) and float(got["scale"]) == 1
    assert torch.equal(got["one.weight"], got["two.weight"])
    expected = fm.state_dict(last.model)
    assert tiny.gap({key: got[key] for key in expected}, expected) <= 1e-12


def test_both_sides_must_run_one_algorithm_with_one_setting() -> None:
    model = tiny.mlp().double()
    messages = fm.ask(strategy("FedProx")(mu=0.3), 1, fm.record(model.state_dict()))
    node, message = next(iter(messages.items()))
    state = contexts()[node]

    def app(recipe: str, **options: Any) -> Any:
        return client_app(lambda: tiny.mlp().double(), rows_of, recipe, **LOCAL, **options)

    assert app("fedprox", mu=0.3)(message, state).has_content()
    for made, problem in (
        (app("fedprox", mu=0.2), "mu = 0.2 here, but the server has 0.3"),
        (app("moon"), "the server runs 'fedprox', this client 'moon'"),
    ):
        with pytest.raises(Exception, match=problem):
            made(message, state)
    with pytest.raises(ValueError, match=r"fedprox\.mju is not a setting"):
        app("fedprox", mju=1.0)


def test_every_strategy_that_needs_a_client_side_is_covered() -> None:
    assert {"FedProx", "Moon", "Scaffold", "FedDyn", "FedSiamDA", "FedSplit"} <= set(NAMES)
    assert all("lr" in options_of(STRATEGIES[name].build) for name in NAMES)
