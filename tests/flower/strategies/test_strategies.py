"""Every strategy gives what its recipe gives on the vectorised engine, whatever the order of arrival."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from declared import SCHEDULE, build, model_of

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'consilience[flower]'")

import flower_messages as fm

from consilience.core import tree
from consilience.core.rounds import run
from consilience.core.settings import Invalid, options_of
from consilience.flower.strategies.catalogue import STRATEGIES
from consilience.flower.strategies.strategy import TooFewNodes, strategy
from consilience.selection import Everyone
from consilience.wire import arrays

pytestmark = pytest.mark.usefixtures("untraced")

OPTIONS: dict[str, dict[str, Any]] = {
    "DUWFedAvg": {"weighting": SCHEDULE},
    "FedSplit": {"step": 1.0, "keeps_z": True},
    "FedProxFedSplit": {"step": 1.0},
    "QFFL": {"lr": 0.05},
}
ROUNDS = 3


def made(name: str, **more: Any) -> Any:
    return strategy(name)(**{**OPTIONS.get(name, {}), **more})


@functools.cache
def elsewhere(name: str, model: str = "convnet", **more: Any) -> list[Any]:
    """The same algorithm on the vectorised engine."""
    recipe = STRATEGIES[name].recipe
    options = {"selection": Everyone(), **{k: v for k, v in OPTIONS.get(name, {}).items() if k != "lr"}, **more}
    engine = tiny.engine(model_of(recipe, model))
    return list(run(build(recipe, **options), engine, rounds=ROUNDS, seed=0))


def start_of(name: str, model: str = "convnet") -> Any:
    return tiny.engine(model_of(STRATEGIES[name].recipe, model)).start()


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_model_is_the_vectorised_engines(name: str) -> None:
    rounds = elsewhere(name)
    got = fm.values_of(fm.train(made(name), rounds, start_of(name)))
    expected = fm.state_dict(rounds[-1].model)
    assert list(got) == list(expected)  # the user's names in the user's order
    assert {k: v.dtype for k, v in got.items()} == {k: v.dtype for k, v in expected.items()}
    assert tiny.same(got, expected)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_order_of_arrival_changes_no_bit(name: str) -> None:
    digests = set()
    for seed in range(3):
        shuffled = functools.partial(_shuffled, random.Random(seed))
        after = fm.train(made(name), elsewhere(name), start_of(name), shuffled)
        digests.add(arrays.digest(fm.values_of(after)))
    assert len(digests) == 1


def _shuffled(rng: random.Random, replies: list[Any]) -> list[Any]:
    rng.shuffle(replies)
    return replies


def test_plain_flower_depends_on_the_order_of_arrival() -> None:
    """Why replies are sorted: Flower's own FedAvg gives several models from the same five replies."""
    from flwr.serverapp.strategy import FedAvg

    (one, *_), start = elsewhere("FedAvg", "mlp"), fm.record(fm.state_dict(start_of("FedAvg", "mlp")))
    messages = fm.ask(made("FedAvg"), 1, start)
    plain = {
        arrays.digest(fm.values_of(FedAvg().aggregate_train(1, list(order))[0]))
        for order in itertools.permutations(fm.answers(messages, one.cohort))
    }
    ours = set()
    for order in itertools.permutations(fm.answers(messages, one.cohort)):
        mine = made("FedAvg")
        fm.ask(mine, 1, start)
        ours.add(arrays.digest(fm.values_of(mine.aggregate_train(1, list(order))[0])))
    assert len(plain) > 1 and len(ours) == 1


def test_fedavg_is_flowers_to_rounding() -> None:
    from flwr.serverapp.strategy import FedAvg

    rounds, start = elsewhere("FedAvg", "mlp"), fm.record(fm.state_dict(start_of("FedAvg", "mlp")))
    replies = fm.answers(fm.ask(made("FedAvg"), 1, start), rounds[0].cohort)
    theirs, _ = FedAvg().aggregate_train(1, replies)
    assert tiny.gap(fm.values_of(theirs), fm.state_dict(rounds[0].model)) < 1e-14


def test_counters_are_never_averaged() -> None:
    rounds = elsewhere("FedAvg")
    got = fm.values_of(fm.train(made("FedAvg"), rounds, start_of("FedAvg")))
    counters = {name: value for name, value in got.items() if name.endswith("num_batches_tracked")}
    assert len(counters) == 2 and all(value.dtype == torch.int64 for value in counters.values())
    sent = rounds[-1].cohort.reply["model"]["buffers"]
    assert all(int(value) == int(sent[name].max()) for name, value in counters.items())


@pytest.mark.parametrize("name", ["SimProx", "FedAdam", "Krum", "Scaffold", "FedAMP"])
def test_without_client_ids_replies_are_sorted_by_node(name: str) -> None:
    digests = set()
    rounds, start = elsewhere(name, "mlp"), start_of(name, "mlp")
    for seed in range(3):
        mine, arrays_now = made(name), fm.record(fm.state_dict(start))
        for one in rounds:
            found = fm.answers(fm.ask(mine, one.number, arrays_now), one.cohort, say_id=False)
            random.Random(seed).shuffle(found)
            arrays_now, _ = mine.aggregate_train(one.number, found)
        digests.add(arrays.digest(fm.values_of(arrays_now)))
    assert len(digests) == 1


def test_what_clients_keep_at_home_is_ignored_if_they_send_it_all_the_same() -> None:
    """FedBN: the server's normalisation layers stay as they were, whoever sends what."""
    rounds, start = elsewhere("FedBN"), start_of("FedBN")
    mine, model = made("FedBN"), fm.record(fm.state_dict(start))
    messages = fm.ask(mine, 1, model)
    replies = fm.answers(messages, rounds[0].cohort)
    for reply in replies:
        for name, value in fm.state_dict(start).items():
            if name not in reply.content["arrays"]:
                reply.content["arrays"][name] = fm.record({"a": torch.full_like(value, 7)})["a"]
    after, _ = mine.aggregate_train(1, replies)
    assert mine.refusals == []
    assert tiny.same(fm.values_of(after), fm.state_dict(rounds[0].model))


# --- what nodes are sent ---------------------------------------------------------------------------------------------


def test_every_node_of_a_swap_is_sent_its_own_model() -> None:
    mine, rounds = made("SimFedSwap"), elsewhere("SimFedSwap")
    start = fm.record(fm.state_dict(start_of("SimFedSwap")))
    after, _ = mine.aggregate_train(1, fm.answers(fm.ask(mine, 1, start), rounds[0].cohort))
    messages = fm.ask(mine, 2, after)
    expected = mine.algorithm.server.broadcast(rounds[0].snapshot.server, rounds[0].cohort.ids).personal["model"]
    for client, node in enumerate(fm.NODES):
        sent = fm.values_of(messages[node].content["arrays"])
        assert tiny.same(sent, fm.state_dict(tree.rows(expected, client)))
    assert len({arrays.digest(fm.values_of(m.content["arrays"])) for m in messages.values()}) == len(fm.NODES)


def test_further_trees_travel_in_records_of_their_own() -> None:
    mine, rounds = made("Scaffold"), elsewhere("Scaffold")
    start = fm.record(fm.state_dict(start_of("Scaffold")))
    after, _ = mine.aggregate_train(1, fm.answers(fm.ask(mine, 1, start), rounds[0].cohort))
    for message in fm.ask(mine, 2, after).values():
        assert set(message.content.array_records) == {"arrays", "control_variate"}
        told = rounds[0].snapshot.server["ledgers"]["control_variate"]
        assert tiny.same(fm.values_of(message.content["control_variate"]), told)
        assert set(message.content["arrays"]) == set(fm.state_dict(rounds[0].model))


def test_clients_are_told_the_round_and_the_settings() -> None:
    start = fm.record(fm.state_dict(start_of("FedProx", "mlp")))
    message = fm.ask(made("FedProx", mu=0.25, seed=3), 7, start)[fm.NODES[0]]
    assert message.content["config"]["server-round"] == 7 and message.content["config"]["proximal-mu"] == 0.25
    told = dict(message.content["algorithm"])
    assert told == {"name": "fedprox", "seed": 3, "mu": 0.25, "report_gamma": False}


def test_a_sample_is_a_function_of_seed_and_round() -> None:
    start = fm.record(fm.state_dict(start_of("FedAvg", "mlp")))
    chosen = [set(fm.ask(made("FedAvg", fraction_train=0.4, seed=s), 1, start)) for s in (1, 1, 2, 3, 4)]
    assert chosen[0] == chosen[1] and all(len(some) == 2 for some in chosen)
    assert len({frozenset(some) for some in chosen}) > 1


def test_participants_are_held_until_the_average() -> None:
    mine, start = made("SimFedSwap", fraction_train=0.4), fm.record(fm.state_dict(start_of("SimFedSwap")))
    chosen = [set(fm.ask(mine, number, start)) for number in range(1, 16)]
    for first in range(0, 15, 3):
        assert chosen[first] == chosen[first + 1] == chosen[first + 2]
    assert len({frozenset(some) for some in chosen}) > 1


def test_new_arrays_start_a_new_run_and_returned_ones_go_on() -> None:
    mine, rounds = made("FedAvgM"), elsewhere("FedAvgM", "mlp")
    first = fm.train(mine, rounds, start_of("FedAvgM", "mlp"))
    again = fm.train(mine, rounds, start_of("FedAvgM", "mlp"))  # momentum of the first run must not leak into it
    assert tiny.same(fm.values_of(first), fm.values_of(again))


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_flowers_arguments_come_first_and_are_unchanged(name: str) -> None:
    from flwr.serverapp.strategy import FedAvg

    theirs = list(inspect.signature(FedAvg).parameters.values())
    assert len(theirs) == 10
    assert list(inspect.signature(strategy(name)).parameters.values())[:10] == theirs
    assert issubclass(strategy(name), FedAvg)
    positional = strategy(name)(0.5, 0.25, 3, 4, 5, "n", "a", "c", **OPTIONS.get(name, {}))
    assert (positional.fraction_train, positional.min_available_nodes, positional.arrayrecord_key) == (0.5, 5, "a")


@pytest.mark.parametrize("name", STRATEGIES)
def test_options_are_the_recipes_with_their_defaults(name: str) -> None:
    from consilience import algorithms
    from consilience.algorithms._common import Common

    recipe = algorithms.recipe(STRATEGIES[name].recipe)
    own = {key: option for key, option in options_of(recipe).items() if key not in Common.__annotations__}
    given = inspect.signature(strategy(name)).parameters
    assert all(given[key].default == (inspect.Parameter.empty if o.required else o.default) for key, o in own.items())


def test_wrong_options_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(Invalid, match=r"SimProx.lambda0 is not a setting \(did you mean 'lambda_0'\?\)"):
        made("SimProx", lambda0=0.5)
    with pytest.raises(Invalid, match=r"SimProx.lambda_0 = 2.0 is out of range"):
        made("SimProx", lambda_0=2.0)
    with pytest.raises(Invalid, match="needs every client's size before the first round"):
        made("FedSplit", weights="examples")
    with pytest.raises(Invalid, match=r"strategy 'SimPrx' is unknown \(did you mean 'SimProx'\?\)"):
        strategy("SimPrx")


def test_a_robust_rule_that_can_never_work_is_refused_before_anything_is_sent() -> None:
    start = fm.record(fm.state_dict(start_of("FedAvg", "mlp")))
    with pytest.raises(Invalid, match="needs n >= 2f"):
        fm.ask(made("Krum", f=2), 1, start)


def test_too_few_nodes_end_with_a_number() -> None:
    start = fm.record(fm.state_dict(start_of("FedAvg", "mlp")))
    with pytest.raises(TooFewNodes, match=r"5 nodes are connected after 0\.01 s, and 9 are needed"):
        fm.ask(made("FedAvg", min_available_nodes=9, wait_for_nodes=0.01), 1, start)


def test_without_flower_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from consilience.flower.strategies.records import flwr

    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.delitem(sys.modules, "flwr.app")
    with pytest.raises(ImportError, match=r'pip install "consilience\[flower\]"'):
        flwr("app")


def test_the_documentation_names_every_strategy() -> None:
    page = (Path(__file__).parents[3] / "docs" / "flower.md").read_text(encoding="utf-8")
    assert [name for name in STRATEGIES if f"`{name}`" not in page] == []


def test_the_package_gives_strategies_by_name() -> None:
    import consilience.flower as pack

    assert pack.SimProx is strategy("SimProx") and "Krum" in dir(pack)
    assert pack.SimProx.__name__ == "SimProx" and "El-Niss" in pack.SimProx.__doc__
    with pytest.raises(AttributeError):
        pack.Nothing  # noqa: B018
