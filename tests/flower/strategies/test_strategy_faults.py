"""One bad client in five: plain Flower is ruined or stops, ours names the client and goes on with the others."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'consilience[flower]'")

import flower_messages as fm

from consilience.core.screening import Limits
from consilience.core.settings import Invalid
from consilience.flower.strategies.strategy import strategy

WEIGHT = "1.weight"  # [8, 36]
BAD = 3  # the client that misbehaves, neither first nor last


def model(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=draw) for name, value in tiny.mlp().state_dict().items()}


def five(mine: Any, round: int = 1, start: Any = None) -> list[Any]:
    """Five replies, of clients with 10 to 14 examples."""
    messages = fm.ask(mine, round, start or fm.record(model(0)))
    return [
        fm.reply(
            messages[node],
            {"arrays": model(k + 1)},
            {"num-examples": 10 + k, "partition-id": k, "loss": 0.5 * k},
        )
        for k, node in enumerate(fm.NODES)
        if node in messages
    ]


def expected(clients: list[int]) -> dict[str, torch.Tensor]:
    """The weighted mean of these clients' models, by hand."""
    total = sum(10 + k for k in clients)
    names = model(0)
    return {name: sum((10 + k) / total * model(k + 1)[name].double() for k in clients) for name in names}


def _array(value: Any) -> Any:
    from flwr.app import Array

    return Array(np.asarray(value))


def put(key: str, value: Any) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        message.content["arrays"][key] = value

    return change


def metric(key: str, value: Any) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        message.content["metrics"][key] = value

    return change


def without(key: str) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        del message.content["arrays"][key]

    return change


def drop(record: str) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        del message.content[record]

    return change


def lying(shape: tuple[int, ...], count: int) -> Any:
    """An .npy header that claims more than it holds."""
    from flwr.app import Array

    made = _array(np.zeros(2, np.float32))
    header = made.data.replace(b"(2,), }" + b" " * (len(str(count)) - 1), f"({count},), }}".encode())
    return Array(dtype="float32", shape=shape, stype="numpy.ndarray", data=header)


def in_other_format(stype: str, data: bytes) -> Any:
    from flwr.app import Array

    return Array(dtype="float32", shape=(8, 36), stype=stype, data=data)


FULL = np.zeros((8, 36), np.float32)
BROKEN: dict[str, tuple[Callable[[Any], None], str]] = {
    "nan": (put(WEIGHT, _array(np.full((8, 36), np.nan, np.float32))), "nonfinite"),
    "infinite": (put(WEIGHT, _array(np.full((8, 36), np.inf, np.float32))), "nonfinite"),
    "huge": (put(WEIGHT, _array(np.full((8, 36), 3e38, np.float32))), "too_large"),
    "squares that overflow": (put(WEIGHT, _array(np.full((8, 36), 1e19, np.float32))), "too_large"),
    "out of proportion": (put(WEIGHT, _array(np.full((8, 36), 1e6, np.float32))), "too_large"),
    "scalar": (put(WEIGHT, _array(np.float32(1))), "shape"),
    "one row": (put(WEIGHT, _array(FULL[:1])), "shape"),
    "double": (put(WEIGHT, _array(FULL.astype(np.float64))), "dtype"),
    "text": (put(WEIGHT, _array(np.array(["a"]))), "dtype"),
    "missing": (without(WEIGHT), "missing_key"),
    "extra": (put("9.weight", _array(FULL)), "unknown_key"),
    "huge claim": (put(WEIGHT, lying((8, 36), 10**9)), "shape"),
    "huge lie": (put(WEIGHT, lying((10**9,), 10**9)), "shape"),
    "zip": (put(WEIGHT, in_other_format("numpy.ndarray", b"PK\x03\x04" + b"\0" * 64)), "format"),
    "pickle": (put(WEIGHT, in_other_format("pickle", b"cos\nsystem\n")), "format"),
    "truncated": (put(WEIGHT, in_other_format("numpy.ndarray", _array(FULL).data[:-4])), "size"),
    "negative count": (metric("num-examples", -5), "examples"),
    "no examples": (metric("num-examples", 0), "examples"),
    "nan count": (metric("num-examples", math.nan), "examples"),
    "infinite count": (metric("num-examples", math.inf), "examples"),
    "absurd count": (metric("num-examples", 10**12), "examples"),
    "list count": (metric("num-examples", [1, 2]), "examples"),
    "no metrics": (drop("metrics"), "examples"),
    "no arrays": (drop("arrays"), "missing_key"),
    "unknown client": (metric("partition-id", -1), "identity"),
    "odd client": (metric("partition-id", 2.5), "identity"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_bad_reply_is_refused_and_the_round_goes_on(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    change, reason = BROKEN[fault]
    mine = strategy("FedAvg")()
    replies = five(mine)
    change(replies[BAD])
    with caplog.at_level(logging.WARNING, "flwr"):
        after, metrics = mine.aggregate_train(1, replies)
    got = fm.values_of(after)
    assert tiny.gap({n: v.double() for n, v in got.items()}, expected([0, 1, 2, 4])) < 1e-6
    ((round, refusal),) = mine.refusals
    assert (round, refusal.reason) == (1, reason)
    unsaid = reason == "identity" or fault == "no metrics"
    who = f"node {fm.NODES[BAD]}" if unsaid else f"{BAD} (node {fm.NODES[BAD]})"
    assert refusal.client == who
    assert metrics["refused-replies"] == 1
    assert f"client {who} refused: {reason}" in caplog.text
    if fault in ("nan", "scalar", "double"):
        assert WEIGHT in refusal.key
    # and the next round, with the client well again, has all five
    after, _ = mine.aggregate_train(2, five(mine, 2, after))
    assert tiny.gap({n: v.double() for n, v in fm.values_of(after).items()}, expected([0, 1, 2, 3, 4])) < 1e-6


@pytest.mark.parametrize(
    "fault", ["nan", "infinite", "one row", "negative count", "missing", "no metrics", "nan count"]
)
def test_plain_flower_is_ruined_or_stops(fault: str) -> None:
    """What the checks are for; if Flower starts to check this itself, the documentation must say so."""
    from flwr.serverapp.strategy import FedAvg

    replies = five(strategy("FedAvg")())
    BROKEN[fault][0](replies[BAD])
    try:
        after, _ = FedAvg().aggregate_train(1, replies)
    except Exception:
        return
    got = {name: value.double() for name, value in fm.values_of(after).items()}
    sound = all(bool(value.isfinite().all()) for value in got.values())
    assert not sound or tiny.gap(got, expected([0, 1, 2, 4])) > 0.1


@pytest.mark.parametrize("name", ["SimProx", "FedAdam", "FedAvgM", "Krum", "SimFedSwap", "FedAMP", "FedAdp"])
def test_server_state_is_untouched_by_a_bad_reply(name: str) -> None:
    """With client 3 always refused, the run is that of the others alone."""
    results = []
    for broken in (True, False):
        mine, arrays = strategy(name)(num_clients=5), fm.record(model(0))
        for round in (1, 2, 3):
            replies = five(mine, round, arrays)
            if broken:
                BROKEN["nan"][0](replies[BAD])
            else:
                del replies[BAD]
            arrays, _ = mine.aggregate_train(round, replies)
        results.append(fm.values_of(arrays))
    assert tiny.same(*results)


def test_errors_and_silence_leave_the_round_to_the_others() -> None:
    from flwr.app import Error, Message

    mine = strategy("FedAvg")()
    messages = fm.ask(mine, 1, fm.record(model(0)))
    replies = five(strategy("FedAvg")())
    failed = Message(Error(code=0, reason="it broke"), reply_to=messages[fm.NODES[1]])
    after, metrics = mine.aggregate_train(1, [replies[4], failed, replies[0]])
    got = {name: value.double() for name, value in fm.values_of(after).items()}
    assert tiny.gap(got, expected([0, 4])) < 1e-6
    assert "refused-replies" not in metrics and mine.refusals == []


def test_a_round_without_a_usable_reply_changes_nothing() -> None:
    mine, start = strategy("FedAvg")(), fm.record(model(0))
    replies = five(mine, 1, start)
    for reply in replies:
        BROKEN["nan"][0](reply)
    after, metrics = mine.aggregate_train(1, replies)
    assert after is None and metrics["refused-replies"] == 5
    assert mine.aggregate_train(1, []) == (None, None)
    after, _ = mine.aggregate_train(2, five(mine, 2, start))
    assert tiny.gap({n: v.double() for n, v in fm.values_of(after).items()}, expected([0, 1, 2, 3, 4])) < 1e-6


def test_strangers_and_second_answers_are_refused() -> None:
    mine = strategy("FedAvg")(fraction_train=0.8)
    replies = five(strategy("FedAvg")())
    asked = fm.ask(mine, 1, fm.record(model(0)))
    (stranger,) = set(fm.NODES) - set(asked)
    copied = copy.deepcopy(next(r for r in replies if r.metadata.src_node_id in asked))
    mine.aggregate_train(1, [*replies, copied])
    assert {(refusal.client, refusal.reason) for _, refusal in mine.refusals} == {
        (f"node {stranger}", "unasked"),
        (f"node {copied.metadata.src_node_id}", "duplicate"),
    }


def test_two_nodes_with_one_number_are_both_refused() -> None:
    mine = strategy("FedAvg")()
    replies = five(mine)
    metric("partition-id", 1)(replies[BAD])
    after, _ = mine.aggregate_train(1, replies)
    assert {r.client for _, r in mine.refusals} == {f"node {fm.NODES[1]}", f"node {fm.NODES[BAD]}"}
    assert tiny.gap({n: v.double() for n, v in fm.values_of(after).items()}, expected([0, 2, 4])) < 1e-6


def test_a_client_cannot_become_another_while_that_is_there() -> None:
    mine, start = strategy("FedAvg")(), fm.record(model(0))
    start, _ = mine.aggregate_train(1, five(mine, 1, start))
    replies = five(mine, 2, start)
    del replies[1]
    metric("partition-id", 1)(replies[2])  # node of client 3, now that client 1 is silent
    mine.aggregate_train(2, replies)
    ((_, refusal),) = mine.refusals
    assert refusal.reason == "identity" and "it was client 3 before" in refusal.detail


def test_a_restarted_node_takes_its_clients_place_again() -> None:
    """A SuperNode that was restarted has another node id; the client that it reports is the same."""
    mine, start = strategy("FedAMP")(), fm.record(model(0))
    start, _ = mine.aggregate_train(1, five(mine, 1, start))
    nodes = [77 if node == fm.NODES[2] else node for node in fm.NODES]
    messages = fm.ask(mine, 2, start, fm.Grid(nodes))
    again = fm.reply(messages[77], {"arrays": model(9)}, {"num-examples": 12, "partition-id": 2})
    mine.aggregate_train(2, [again])
    assert mine.refusals == []
    state = mine._serving._state["models"]["params"]
    assert torch.equal(state[WEIGHT][2], model(9)[WEIGHT]) and torch.equal(state[WEIGHT][1], model(2)[WEIGHT])


def test_more_nodes_than_places_sit_the_round_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    mine = strategy("FedAMP")(num_clients=3)
    with caplog.at_level(logging.WARNING, "flwr"):
        messages = fm.ask(mine, 1, fm.record(model(0)))
    assert len(messages) == 3 and "set num_clients" in caplog.text
    assert len(fm.ask(strategy("FedAvg")(num_clients=3), 1, fm.record(model(0)))) == 5  # a number is only a label here


def test_limits_are_the_users() -> None:
    mine = strategy("FedAvg")(limits=Limits(castable=("float64",), min_valid=5))
    replies = five(mine)
    put(WEIGHT, _array(model(BAD + 1)[WEIGHT].double().numpy()))(replies[BAD])
    after, _ = mine.aggregate_train(1, replies)
    assert tiny.gap({n: v.double() for n, v in fm.values_of(after).items()}, expected([0, 1, 2, 3, 4])) < 1e-6
    assert mine.aggregate_train(2, five(mine, 2, after)[:4])[0] is None  # four are too few


def test_a_giant_update_is_shortened_to_the_bound() -> None:
    mine = strategy("FedAvg")(limits=Limits(max_norm=0.5))
    replies = five(mine)
    put(WEIGHT, _array(np.full((8, 36), 1e30, np.float32)))(replies[BAD])
    after, _ = mine.aggregate_train(1, replies)
    way = [fm.values_of(after)[name].double() - value.double() for name, value in model(0).items()]
    assert math.sqrt(sum(float(part.square().sum()) for part in way)) <= 0.5 + 1e-6


def test_odd_metrics_are_dropped_and_the_reply_stays() -> None:
    mine = strategy("FedAvg")()
    replies = five(mine)
    metric("loss", math.nan)(replies[BAD])
    metric("history", [1.0] * 3)(replies[0])
    after, metrics = mine.aggregate_train(1, replies)
    assert mine.refusals == [] and after is not None
    assert set(metrics) == set()  # neither is in all replies
    replies = five(mine, 2, after)
    _, metrics = mine.aggregate_train(2, replies)
    assert metrics["loss"] == pytest.approx(sum((10 + k) * 0.5 * k for k in range(5)) / 60)


def test_a_functions_own_metrics_get_every_reply_that_was_let_in() -> None:
    from flwr.app import MetricRecord

    seen: list[list[int]] = []

    def count(records: list[Any], key: str) -> MetricRecord:
        seen.append([record["metrics"]["partition-id"] for record in records])
        return MetricRecord({"total": sum(record["metrics"][key] for record in records)})

    mine = strategy("SimProx")(train_metrics_aggr_fn=count)
    replies = five(mine)
    BROKEN["nan"][0](replies[BAD])
    _, metrics = mine.aggregate_train(1, replies[::-1])
    assert metrics["total"] == 10 + 11 + 12 + 14 and seen == [[0, 1, 2, 4]]


def test_evaluation_goes_on_without_those_that_cannot_be_believed() -> None:
    from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

    mine, start = strategy("SimProx")(), fm.record(model(0))
    messages = {m.metadata.dst_node_id: m for m in mine.configure_evaluate(1, start, ConfigRecord(), fm.Grid())}
    assert set(messages) == set(fm.NODES)
    said = [{"num-examples": 10, "accuracy": 0.5}, {"num-examples": 30, "accuracy": 0.9}]
    said += [{"num-examples": -7, "accuracy": 0.1}, {"accuracy": 0.2}, {"num-examples": 10, "accuracy": 0.5}]
    replies = [
        Message(RecordDict({"metrics": MetricRecord(one)}), reply_to=messages[node])
        for node, one in zip(fm.NODES, said)
    ]
    metrics = mine.aggregate_evaluate(1, replies)
    assert metrics["accuracy"] == pytest.approx((10 * 0.5 + 30 * 0.9 + 10 * 0.5) / 50)
    assert [refusal.reason for _, refusal in mine.refusals] == ["examples", "examples"]


def test_a_strategy_that_needs_more_says_what_is_missing() -> None:
    for name, missing in (("FedNova", "num-steps"), ("QFFL", "start-loss"), ("Scaffold", "control_change")):
        mine = strategy(name)()
        after, _ = mine.aggregate_train(1, five(mine))
        assert after is None and len(mine.refusals) == 5
        assert missing in str(mine.refusals[0][1])
    mine = strategy("DUWFedAvg")(weighting=_schedule())
    replies = five(mine)
    for reply in replies:
        del reply.content["metrics"]["partition-id"]
    assert mine.aggregate_train(1, replies)[0] is None
    assert "'partition-id'" in mine.refusals[0][1].detail


def _schedule() -> Any:
    from consilience.server.averaging.weighting.schedule import ScheduleWeights

    return ScheduleWeights(table=((0.2, 0.2, 0.2, 0.2, 0.2),))


def test_arrays_that_cannot_be_a_model_are_refused_at_once() -> None:
    with pytest.raises(Invalid, match="'a/b' cannot be used"):
        fm.ask(strategy("FedAvg")(), 1, fm.record({"a/b": torch.zeros(2)}))
    with pytest.raises(Invalid, match="none of the 1 arrays is a parameter"):
        fm.ask(strategy("FedAvg")(), 1, fm.record({"steps": torch.zeros(2, dtype=torch.int64)}))
    with pytest.raises(Invalid, match="never configured"):
        strategy("FedAvg")().aggregate_train(1, five(strategy("FedAvg")()))


def test_a_bag_of_trees_has_nothing_to_average() -> None:
    mine = strategy("SimProx")()
    with pytest.raises(Invalid, match=r"bytes and no parameters, as those of XGBoost.*keep Flower's own strategy"):
        fm.ask(mine, 1, fm.record({"0": torch.zeros(5, dtype=torch.uint8)}))
    with pytest.raises(Invalid, match="none of the 1 arrays is a parameter"):
        fm.ask(mine, 1, fm.record({"0": torch.zeros(5, dtype=torch.int64)}))


def test_arguments_of_flowers_former_strategies_are_named_as_such() -> None:
    with pytest.raises(Invalid, match=r"FedAvg.fraction_fit is an argument of Flower's former strategies"):
        strategy("FedAvg")(fraction_fit=0.5)
    with pytest.raises(Invalid, match=r"FedAvg.fraction_trian is not a setting .did you mean 'fraction_train'"):
        strategy("FedAvg")(fraction_trian=0.5)
