"""Secure sums: Flower's own SecAgg+ on both sides, in front of a Grid that really serialises."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from declared import CLIENTS, build
from torch import nn

from consilience.core import tree
from consilience.core.algorithm import Algorithm
from consilience.core.exchange import Broadcast
from consilience.core.federation import Federation
from consilience.core.rounds import Diverged, Round, run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.task.task import Task
from consilience.wire import arrays
from consilience.wire.template import Template

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from flower_loopback import Loopback, apps, through_bytes

from consilience.core.rounds import TooFewClients
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.workload import Workload
from consilience.environments.environment import Environment
from consilience.flower.engine.engine import FlowerEngine
from consilience.flower.messages import wire
from consilience.flower.messages.mail import Waiting
from consilience.flower.messages.pulling import MessageLimit
from consilience.flower.secure.terms import FEWEST, MODULUS, SecureTerms, VectorLayout
from consilience.selection import Uniform

STAGES = ("setup", "share_keys", "collect_masked_vectors", "unmask")
TERMS, UNIFORM = SecureTerms(), SecureTerms(weights="uniform")
QUICK = Waiting(deadline=0.3, wait=0.3, retries=1, pause=0.01)
G18 = 3.6e-6  # of each contribution to a sum, with a clip of 8 and 2^22 levels
SIX = (9, 4, 3, 12, 6, 5)
pytestmark = pytest.mark.usefixtures("untraced")


class Stages(Loopback):
    """A Loopback that knows the stage of each message; `drop` says who does not answer which."""

    def __init__(self, apps: Any) -> None:
        super().__init__(apps)
        self.drop: dict[str, set[int]] = {}
        self.seen: list[tuple[str, int, Any, Any]] = []  # stage, node, question, answer

    def pull_messages(self, names: Any) -> list[Any]:
        def stays(name: str) -> bool:
            message = self._waiting.get(name)
            return message is None or message.metadata.dst_node_id not in self.drop.get(stage_of(message), set())

        return super().pull_messages([name for name in names if stays(name)])

    def answer(self, message: Any) -> Any:
        stage, asked = stage_of(message), through_bytes(message)
        reply = super().answer(message)
        self.seen.append((stage, message.metadata.dst_node_id, asked, reply))
        return reply


def stage_of(message: Any) -> str:
    records = message.content.config_records
    return str(records["secaggplus_configs"]["stage"]) if "secaggplus_configs" in records else ""


def convnet() -> Task:
    return Task(tiny.MODELS["convnet"]())


def mlp() -> Task:
    return Task(tiny.MODELS["mlp"]())


def grid_of(
    algorithm: Algorithm,
    terms: SecureTerms | None = TERMS,
    task: Callable[[], Task] = mlp,
    federation: Federation | None = None,
) -> Stages:
    data = federation or tiny.federation()
    return Stages(apps(algorithm, task, data, [[k] for k in range(len(data))], secure=terms))


def engine_on(
    grid: Loopback, algorithm: Algorithm, terms: SecureTerms | None = TERMS, task: Any = mlp, **settings: Any
) -> FlowerEngine:
    options = {"dtype": "float64", "waiting": QUICK, "clients": CLIENTS, "min_available": 3, **settings}
    engine = FlowerEngine(grid, task(), algorithm, run="a-run", secure=terms, **options)
    engine.meet()
    return engine


def in_clear(
    algorithm: Algorithm, rounds: int, task: Any = mlp, federation: Federation | None = None, **settings: Any
) -> list[Round]:
    data = federation or tiny.federation()
    engine = Vectorised(task(), data, dtype="float64", lane="serial", device="cpu", **settings)
    return list(run(algorithm, engine, rounds=rounds, seed=5))


def furthest(one: Tree, other: Tree) -> float:
    here, there = tree.flatten(one), tree.flatten(other)
    assert list(here) == list(there)
    return max(float((here[path].double() - there[path].double()).abs().max()) for path in here)


def bound(sizes: tuple[int, ...], terms: SecureTerms) -> float:
    """Of a mean: n x 3.6e-6 for the sum, whose largest weight is 1, over the sum of the weights."""
    weights = [terms.weight(size) for size in sizes]
    return len(weights) * G18 * max(weights) / sum(weights)


class Away(Environment):
    """Some clients are not heard, so that the others' mean can be computed in clear."""

    def reachable(self, now: int, ids: Any, seed: int) -> np.ndarray:
        return ~np.isin(np.asarray(ids), [0, 3])


# --- the sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedadam", "fedavgm", "fedbn", "scaffold", "feddyn"])
def test_the_mean_is_that_of_the_replies_in_clear(name: str) -> None:
    """Uneven weights (1 to 12 rows), batch norm's buffers, momentum, personal layers, and ledgers that read sums."""
    algorithm = build(name)
    terms = UNIFORM if name in ("scaffold", "feddyn") else TERMS
    (secret,) = run(
        algorithm, engine_on(grid_of(algorithm, terms, convnet), algorithm, terms, convnet), rounds=1, seed=5
    )
    (plain,) = in_clear(algorithm, 1, convnet)
    limit = bound(tiny.SIZES, terms)
    got, whole = secret.cohort.reply, plain.cohort
    weights = whole.examples if terms is TERMS else torch.ones(CLIENTS, dtype=torch.float64)
    for path, leaf in tree.flatten(whole.reply).items():
        if leaf.is_floating_point():  # what the server rule is given
            mean = torch.tensordot(weights / weights.sum(), leaf, dims=1)
            assert float((tree.flatten(got)[path][0] - mean).abs().max()) <= limit
    assert secret.cohort.ids.tolist() == whole.ids.tolist() and secret.cohort.counts == {}
    assert torch.equal(secret.cohort.examples, whole.examples)
    assert torch.allclose(secret.notes["weights"], plain.notes["weights"], rtol=0, atol=1e-15)
    if name != "fedadam":  # which divides by the update's own size, and so magnifies what is close to nothing
        assert furthest(secret.model, plain.model) <= (2 if name == "feddyn" else 1) * limit  # it moves by H, too


def test_sum_error_is_below_what_was_asked_for() -> None:
    """G18, literally: n x 3.6e-6 for the sum of n clients of one weight, in every parameter of every client count."""
    for sizes in ((5,) * 3, (5,) * 7):
        data, algorithm = tiny.federation(sizes), build("fedavg")
        engine = engine_on(grid_of(algorithm, federation=data), algorithm, clients=len(sizes))
        (secret,) = run(algorithm, engine, rounds=1, seed=5)
        (plain,) = in_clear(algorithm, 1, federation=data)
        assert furthest(secret.model, plain.model) * len(sizes) <= len(sizes) * G18


def test_counters_are_never_averaged_and_the_loss_is_a_mean() -> None:
    algorithm = build("fedavg")
    rounds = list(
        run(algorithm, engine_on(grid_of(algorithm, task=convnet), algorithm, task=convnet), rounds=2, seed=5)
    )
    for mine, theirs in zip(rounds, in_clear(algorithm, 2, convnet), strict=True):
        assert torch.equal(
            mine.model["buffers"]["1.num_batches_tracked"], theirs.model["buffers"]["1.num_batches_tracked"]
        )
        assert torch.equal(
            mine.cohort.reply["model"]["buffers"]["1.num_batches_tracked"],
            theirs.cohort.reply["model"]["buffers"]["1.num_batches_tracked"],
        )
        shares = theirs.cohort.examples / theirs.cohort.examples.sum()
        assert mine.cohort.reply["loss"].shape == (CLIENTS,)
        assert float(mine.cohort.reply["loss"][0]) == pytest.approx(
            float(shares @ theirs.cohort.reply["loss"]), abs=1e-4
        )


@pytest.mark.parametrize("channel", ["clip", "noise", "chain"])
def test_what_clients_do_to_their_updates_is_summed_too(channel: str) -> None:
    from consilience.channel import Chain, Clip, Noise

    made: Any = {"clip": Clip(bound=0.05), "noise": Noise(deviation=0.1)}
    made["chain"] = Chain(channels=(made["clip"], made["noise"]))
    algorithm = build("fedavg", channel=made[channel])
    (secret,) = run(algorithm, engine_on(grid_of(algorithm), algorithm), rounds=1, seed=5)
    (plain,) = in_clear(algorithm, 1)
    assert furthest(secret.model, plain.model) <= bound(tiny.SIZES, TERMS)


def test_a_run_repeats_itself_to_the_bit_and_leaves_numpy_alone() -> None:
    """Flower rounds at random by NumPy's global generator, whatever state that is in."""
    algorithm, found = build("fedavg"), []
    for state in (7, 8):
        np.random.seed(state)
        found.append(list(run(algorithm, engine_on(grid_of(algorithm), algorithm), rounds=2, seed=5)))
        drawn = np.random.random()
        np.random.seed(state)
        assert drawn == np.random.random()
    first, again = found
    assert tiny.same(first[-1].model, again[-1].model)
    resumed = list(run(algorithm, engine_on(grid_of(algorithm), algorithm), rounds=2, seed=5, resume=first[0].snapshot))
    assert tiny.same(first[-1].model, resumed[-1].model)


# --- what the server sees --------------------------------------------------------------------------------------------


def payloads(value: Any) -> list[bytes]:
    """Every byte string in a message, however deep."""
    content, found = value.content, []
    for record in content.array_records.values():
        found += [array.data for array in record.values()]
    for record in (*content.config_records.values(), *content.metric_records.values()):
        for item in record.values():
            for one in item if isinstance(item, list) else [item]:
                found.append(one if isinstance(one, bytes) else str(one).encode())
    return found


def test_no_reply_is_ever_seen_in_clear() -> None:
    algorithm, data = build("fedavg"), tiny.federation()
    grid = grid_of(algorithm)
    (secret,) = run(algorithm, engine_on(grid, algorithm), rounds=1, seed=5)
    (plain,) = in_clear(algorithm, 1)
    start = Vectorised(mlp(), data, dtype="float64", lane="serial", device="cpu").start()
    layout = VectorLayout(Template.of(tree.rows(plain.cohort.reply, 0)))
    nodes = sorted(grid.apps)
    told = [(stage, node, reply) for stage, node, _, reply in grid.seen if stage]
    assert [sum(one[0] == stage for one in told) for stage in STAGES] == [CLIENTS] * 4
    masked = {node: reply for stage, node, reply in told if stage == "collect_masked_vectors"}
    for client, node in enumerate(nodes):
        reply = tree.rows(plain.cohort.reply, client)
        update = layout.vector(reply, {"model": start})
        share = data.train.sizes[client].item() / max(tiny.SIZES)
        grains = np.round((np.clip(share * update, -8, 8) + 8) / TERMS.step).astype(np.int64)
        sent = arrays.from_bytes(
            masked[node].content.config_records["secaggplus_configs"]["masked_params"][1], (layout.length,), torch.int64
        ).numpy()
        apart = np.abs(sent - grains)
        assert (apart > 1000).mean() > 0.99  # masked: uniform in 2^32, of which the vector takes a thousandth
        for values in (*tree.flatten(reply).values(), torch.from_numpy(update), torch.from_numpy(share * update)):
            for dtype in (torch.float64, torch.float32):
                raw = values.to(dtype).contiguous().numpy().tobytes()[: 8 * 16]
                assert len(raw) >= 4
                hidden = [raw in part for _, _, seen in told for part in payloads(seen)]
                assert not any(hidden) or len(raw) < 16  # single numbers occur by chance
    for _, _, reply in told:
        assert all(not record for record in reply.content.array_records.values())
        if "answer" in reply.content:  # a digest would let the server test guesses
            (said,) = json.loads(reply.content["answer"]["json"])
            assert said["digest"] == "" and set(said) == {field.name for field in fields(wire.ReplyReport)}
            assert set(json.loads(reply.content["aside"]["json"])) == {"clipped", "counters"}
    rows = tree.flatten(secret.cohort.reply)
    assert all(torch.equal(leaf[0], leaf[-1]) for leaf in rows.values())  # one mean in everybody's place


def test_a_client_that_keeps_its_reply_secret_never_answers_in_clear() -> None:
    algorithm = build("fedavg")
    with pytest.raises(TooFewClients, match=r"its settings differ: secure_aggregation"):
        engine_on(grid_of(algorithm), algorithm, None)
    with pytest.raises(TooFewClients, match=r"its settings differ: secure_aggregation"):
        engine_on(grid_of(algorithm, None), algorithm)
    with pytest.raises(TooFewClients, match=r"its settings differ: secure_aggregation"):
        engine_on(grid_of(algorithm), algorithm, SecureTerms(clip=4.0))
    grid = grid_of(algorithm)
    engine = engine_on(grid, algorithm)
    engine._secure = None  # a server that pretends
    with pytest.raises(TooFewClients, match=r"takes part in secure sums only, and was asked for a reply in clear"):
        list(run(algorithm, engine, rounds=1, seed=5))


@pytest.mark.parametrize("rule", ["train", "pre_training"])
def test_not_even_under_another_name(rule: str) -> None:
    """A server that asks for training as if it were a test."""
    algorithm = build("fedavg")
    grid = grid_of(algorithm)
    engine = engine_on(grid, algorithm)
    (first,) = run(algorithm, engine, rounds=1, seed=5)
    workload = Workload.of(Environment(), algorithm.client.work, np.arange(CLIENTS), engine.sizes, round=1, seed=5)
    orders = engine._orders(rule, Broadcast(shared={"model": first.model}), workload, 1, 5)
    content = orders.content(workload.only(np.array([0])), None)
    node = sorted(grid.apps)[0]
    answers = engine._mail.ask({node: content}, "evaluate", "round 2", 1.0, {node: MessageLimit(0, 0)})
    assert not answers.replies and f"of '{rule}', this node gives a sum only" in next(iter(answers.failures.values()))


def test_a_client_gives_one_reply_a_round() -> None:
    """The difference of two sums, with and without a client, would be its reply."""
    algorithm = build("fedavg")
    grid = grid_of(algorithm)
    engine = engine_on(grid, algorithm)
    (first,) = run(algorithm, engine, rounds=1, seed=5)
    (again,) = run(algorithm, engine, rounds=1, seed=5)
    assert len(first.cohort) == CLIENTS and len(again.cohort) == 0
    failed = [reply.error.reason for *_, reply in grid.seen if reply.has_error()]
    assert len(failed) == CLIENTS and all("has given its reply of round 1 to a sum" in reason for reason in failed)


@pytest.mark.parametrize(
    ("stage", "key", "value", "why"),
    [
        ("setup", "threshold", 2, "threshold = 2: 3 was agreed on"),
        ("setup", "clipping_range", 80.0, "clipping_range = 80.0: 8.0 was agreed on"),
        ("setup", "target_range", 2, "target_range = 2: 4194304 was agreed on"),
        ("setup", "share_num", 3, "share_num = 3: 5 was agreed on"),
        ("unmask", "dead_nids", "everyone", "asks for both masks of one client"),
    ],
)
def test_a_client_refuses_a_server_that_weakens_the_sum(stage: str, key: str, value: Any, why: str) -> None:
    algorithm = build("fedavg")
    grid = grid_of(algorithm)
    engine, reasons = engine_on(grid, algorithm, waiting=Waiting(deadline=0.3, wait=0.3, retries=0)), []
    ask = grid.answer

    def cheat(message: Any) -> Any:
        if stage_of(message) == stage:
            configs = message.content.config_records["secaggplus_configs"]
            configs[key] = sorted(grid.apps) if value == "everyone" else value
        reply = ask(message)
        if reply.has_error():
            reasons.append(reply.error.reason)
        return reply

    grid.answer = cheat  # type: ignore[method-assign]
    with pytest.raises((TooFewClients, Diverged)):
        list(run(algorithm, engine, rounds=3, seed=5))
    assert reasons and all(why in reason for reason in reasons)


# --- clients that fall silent ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_third_may_fall_silent_at_any_stage(stage: str) -> None:
    algorithm, data = build("fedavg"), tiny.federation(SIX)
    grid = grid_of(algorithm, federation=data)
    engine = engine_on(grid, algorithm, clients=6)
    grid.drop[stage] = {sorted(grid.apps)[0], sorted(grid.apps)[3]}
    (secret,) = run(algorithm, engine, rounds=1, seed=5)
    late = stage == "unmask"  # their replies are in the sum already
    (plain,) = in_clear(algorithm, 1, federation=data, environment=None if late else Away())
    sizes = SIX if late else tuple(size for client, size in enumerate(SIX) if client not in (0, 3))
    assert secret.cohort.ids.tolist() == (list(range(6)) if late else [1, 2, 4, 5])
    assert secret.cohort.counts.get("silent", 0) == (0 if late else 2)
    weights = sum(sizes) / max(SIX)
    assert furthest(secret.model, plain.model) <= len(sizes) * G18 / weights


def test_two_in_one_round_at_different_stages_and_back_in_the_next() -> None:
    algorithm, data = build("fedavg"), tiny.federation(SIX)
    grid = grid_of(algorithm, federation=data)
    engine = engine_on(grid, algorithm, clients=6)
    first, second = sorted(grid.apps)[0], sorted(grid.apps)[3]
    grid.drop = {"share_keys": {first}, "collect_masked_vectors": {second}}
    rounds = run(algorithm, engine, rounds=2, seed=5)
    one = next(rounds)
    assert one.cohort.ids.tolist() == [1, 2, 4, 5] and one.cohort.counts["silent"] == 2
    (plain,) = in_clear(algorithm, 1, federation=data, environment=Away())
    assert furthest(one.model, plain.model) <= 4 * G18 * max(SIX) / 18
    grid.drop = {}
    two = next(rounds)
    assert two.cohort.ids.tolist() == list(range(6)) and "silent" not in two.cohort.counts


@pytest.mark.parametrize("stage", STAGES)
def test_too_many_silent_is_a_round_that_changes_nothing(stage: str) -> None:
    algorithm = build("fedavg")
    grid = grid_of(algorithm)
    engine = engine_on(grid, algorithm)
    rounds = run(algorithm, engine, rounds=3, seed=5)
    before = next(rounds)
    grid.drop[stage] = set(sorted(grid.apps)[:3])
    after = next(rounds)
    assert tiny.same(before.model, after.model) and len(after.cohort) == 0
    assert after.cohort.counts["secure_sum"] == 1
    (why,) = [str(refusal) for refusal in after.cohort.refusals if refusal.reason == "secure_sum"]
    number = STAGES.index(stage) + 1
    assert f"2 of 5 nodes answered stage {number} of 4, and 3 are needed" in why
    assert after.cohort.counts.get("silent", 0) == (0 if stage == "unmask" else 3)
    grid.drop = {}
    assert len(next(rounds).cohort) == CLIENTS


def test_a_memory_goes_back_with_a_sum_that_failed() -> None:
    """SCAFFOLD's clients keep a new control variate before anybody knows that the sum cannot be unmasked."""
    algorithm = build("scaffold")
    grid = grid_of(algorithm, UNIFORM)
    rounds = run(algorithm, engine_on(grid, algorithm, UNIFORM), rounds=3, seed=5)
    first = next(rounds)
    grid.drop["unmask"] = set(sorted(grid.apps)[:3])
    failed = next(rounds)
    assert tiny.same(first.snapshot.memory, failed.snapshot.memory)
    grid.drop = {}
    third = next(rounds)
    assert len(third.cohort) == CLIENTS and "memory_lost" not in third.cohort.counts


def test_nobody_answers_is_asked_again_then_a_clean_end() -> None:
    algorithm = build("fedavg")
    grid = grid_of(algorithm)
    engine = engine_on(grid, algorithm)
    grid.deaf = set(grid.apps)
    with pytest.raises(TooFewClients, match=r"2 times in a row \(0 of 5 nodes answered stage 1 of 4, and 3 are needed"):
        list(run(algorithm, engine, rounds=1, seed=5))


def test_fewer_than_three_are_waited_for_and_two_are_never_summed() -> None:
    algorithm = build("fedavg")
    grid = grid_of(algorithm)
    engine = engine_on(grid, algorithm, min_available=None)
    grid.online = set(sorted(grid.apps)[:2])
    with pytest.raises(TooFewClients, match=rf"2 of the {FEWEST} clients"):
        list(run(algorithm, engine, rounds=1, seed=5))
    grid.online = set(grid.apps)
    few = build("fedavg", selection=Uniform(count=2))
    grid = grid_of(few)
    with pytest.raises(Diverged, match=r"had no usable reply \(1 secure_sum\)"):
        list(run(few, engine_on(grid, few), rounds=3, seed=5))
    assert all(stage == "" for stage, *_ in grid.seen)


# --- values that cannot be summed ------------------------------------------------------------------------------------


def spoilt(federation: Federation, client: int, value: float) -> Federation:
    """With this in one client's rows."""
    begin, rows = int(federation.train.starts[client]), int(federation.train.sizes[client])
    federation.train.x[begin : begin + rows] = value
    return federation


def test_a_client_with_nan_refuses_itself_and_the_others_are_summed() -> None:
    algorithm, data = build("fedavg"), spoilt(tiny.federation(), 3, 1e308)
    grid = grid_of(algorithm, task=big, federation=data)
    (secret,) = run(algorithm, engine_on(grid, algorithm, task=big), rounds=1, seed=5)
    (plain,) = in_clear(algorithm, 1, big, federation=data)
    assert secret.cohort.ids.tolist() == plain.cohort.ids.tolist() == [0, 1, 2, 4]
    assert secret.cohort.counts == {"nonfinite": 1}
    (refusal,) = secret.cohort.refusals
    assert refusal.client == 3 and "refused at the client" in str(refusal) and "model/params" in str(refusal)
    assert furthest(secret.model, plain.model) <= 4 * G18 * 12 / 20


def test_large_updates_are_clipped_value_by_value_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    terms = SecureTerms(clip=0.01)
    algorithm = build("fedavg")
    (secret,) = run(algorithm, engine_on(grid_of(algorithm, terms), algorithm, terms), rounds=1, seed=5)
    (plain,) = in_clear(algorithm, 1)
    start = Vectorised(mlp(), tiny.federation(), dtype="float64", lane="serial", device="cpu").start()
    weights = plain.cohort.examples / plain.cohort.examples.sum()
    beyond = 0
    for name, leaf in plain.cohort.reply["model"]["params"].items():
        moves = leaf - start["params"][name]
        beyond += int((moves.abs() > 0.01).sum())
        mean = start["params"][name] + torch.tensordot(weights, moves.clamp(-0.01, 0.01), dims=1)
        assert float((secret.model["params"][name] - mean).abs().max()) <= 5 * terms.step * 12 / 32
    beyond += int((plain.cohort.reply["loss"].abs() > 0.01).sum())
    assert secret.cohort.counts["clipped_updates"] == CLIENTS
    assert f"{beyond} values of {CLIENTS} clients were clipped" in caplog.text


def test_a_vector_that_is_not_the_masked_one_spoils_the_sum_and_nothing_else() -> None:
    from flwr.common import ndarray_to_bytes

    algorithm = build("fedavg")
    grid = grid_of(algorithm)
    rounds = run(algorithm, engine_on(grid, algorithm), rounds=2, seed=5)
    before = next(rounds)

    def lie(node: int, reply: Any) -> Any:
        configs = reply.content.config_records.get("secaggplus_configs")
        if node == sorted(grid.apps)[2] and configs is not None and "masked_params" in configs:
            weight, vector = configs["masked_params"]
            length = (len(vector) - 128) // 8
            other = np.random.default_rng(0).integers(0, MODULUS, length)
            configs["masked_params"] = [weight, ndarray_to_bytes(other)]
        return reply

    grid.tamper = lie
    after = next(rounds)
    assert tiny.same(before.model, after.model) and after.cohort.counts == {"secure_sum": 1}
    assert "no mean of values within 8" in str(after.cohort.refusals[0])


LIES: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "no keys": ("setup", lambda it: it.content.config_records["secaggplus_configs"].pop("pk1"), "format"),
    "no lists": (
        "share_keys",
        lambda it: it.content.config_records["secaggplus_configs"].__setitem__("dsts", "x"),
        "format",
    ),
    "a short vector": (
        "collect_masked_vectors",
        lambda it: it.content.config_records["secaggplus_configs"].__setitem__("masked_params", [b"x", b"y"]),
        "format",
    ),
    "another weight": ("collect_masked_vectors", lambda it: said_otherwise(it, examples=1000), "examples"),
    "another client": ("collect_masked_vectors", lambda it: said_otherwise(it, client=0), "client"),
    "another round": ("collect_masked_vectors", lambda it: said_otherwise(it, round=7), "round"),
    "other counters": (
        "collect_masked_vectors",
        lambda it: wire.put_json(it.content, "aside", {"clipped": 0, "counters": {"x": 1}}),
        "format",
    ),
    "other shares": (
        "unmask",
        lambda it: it.content.config_records["secaggplus_configs"].__setitem__("nids", [1, 2, 3, 4, 5]),
        "format",
    ),
}


def said_otherwise(reply: Any, **changes: Any) -> None:
    said = wire.get_json(reply.content, "answer")
    wire.put_json(reply.content, "answer", [{**one, **changes} for one in said])


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_was_not_asked_for_is_refused_by_name_and_the_others_are_summed(lie: str) -> None:
    stage, change, reason = LIES[lie]
    algorithm = build("fedavg")
    grid = grid_of(algorithm)
    engine, current = engine_on(grid, algorithm), {"stage": ""}
    ask = grid.answer

    def told(message: Any) -> Any:
        current["stage"] = stage_of(message)
        return ask(message)

    def tamper(node: int, reply: Any) -> Any:
        if node == sorted(grid.apps)[2] and current["stage"] == stage:
            change(reply)
        return reply

    grid.answer, grid.tamper = told, tamper  # type: ignore[method-assign]
    (only,) = run(algorithm, engine, rounds=1, seed=5)
    assert only.cohort.ids.tolist() == (list(range(5)) if stage == "unmask" else [0, 1, 3, 4])
    assert [(refusal.client, refusal.reason) for refusal in only.cohort.refusals] == [(2, reason)]
    assert only.cohort.counts == {reason: 1} and tiny.finite(only.model)


def test_whole_numbers_that_are_no_single_counters_are_refused_at_the_start() -> None:
    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny.MODELS["mlp"]()
            self.register_buffer("seen", torch.zeros(7, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    algorithm = build("fedavg")
    with pytest.raises(Invalid, match=r"buffers/seen holds whole numbers or flags, shape \(7,\)"):
        engine_on(grid_of(algorithm), algorithm, task=lambda: Task(Tabled()))


def test_two_clients_on_one_node_are_refused_with_the_reason() -> None:
    algorithm, data = build("fedavg"), tiny.federation()
    grid = Stages(apps(algorithm, mlp, data, [[0, 1], [2], [3], [4]], secure=TERMS))
    with pytest.raises(TooFewClients, match=r"node holds clients \[0, 1\]: a secure sum needs one client on each node"):
        engine_on(grid, algorithm, min_available=5)


def test_personal_broadcasts_are_refused() -> None:
    algorithm = build("duw_fednova")
    engine = engine_on(grid_of(algorithm), algorithm)
    with pytest.raises(Invalid, match=r"replies to one broadcast"):
        list(run(algorithm, engine, rounds=1, seed=5))


# --- what it costs ---------------------------------------------------------------------------------------------------


def big() -> Task:
    return Task(tiny.seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 256), nn.ReLU(), nn.Linear(256, 3))))


def traffic(terms: SecureTerms | None, dtype: str) -> int:
    """Bytes of every message of a round, both ways, as Flower serialises them."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    algorithm, data = build("fedavg"), tiny.federation()
    options = {"dtype": dtype, "lane": "serial", "device": "cpu"}
    grid = Stages(apps(algorithm, big, data, [[k] for k in range(CLIENTS)], secure=terms, engine=options))
    engine = engine_on(grid, algorithm, terms, big, dtype=dtype)
    grid.seen.clear()
    list(run(algorithm, engine, rounds=1, seed=5))
    messages = [message for _, _, asked, reply in grid.seen for message in (asked, reply)]
    return sum(len(part.deflate()) for message in messages for part in get_all_nested_objects(message).values())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_traffic_is_at_most_twice_that_of_replies_in_clear(dtype: str) -> None:
    """A model of 10,243 parameters: masked values take eight bytes each, whatever the type of the model."""
    assert traffic(TERMS, dtype) <= 2 * traffic(None, dtype)


def test_the_bytes_that_are_recorded_are_those_that_were_sent() -> None:
    algorithm = build("fedavg")
    grid = grid_of(algorithm)
    (secret,) = run(algorithm, engine_on(grid, algorithm), rounds=1, seed=5)
    values = [one[3].content.config_records["secaggplus_configs"].values() for one in grid.seen if one[0]]
    sizes = [
        len(one) if isinstance(one, bytes) else 8
        for some in values
        for it in some
        for one in (it if isinstance(it, list) else [it])
    ]
    assert secret.bytes_up == sum(sizes) > 8 * CLIENTS * sum(leaf.numel() for leaf in tree.leaves(secret.model))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"clip": 0.0}, "SecureTerms.clip = 0.0 is out of range"),
        ({"levels": 100}, "SecureTerms.levels = 100 is out of range"),
        ({"threshold": 0.4}, "SecureTerms.threshold = 0.4 is out of range"),
        ({"threshold": 1.0}, "SecureTerms.threshold = 1.0 is out of range"),
    ],
)
def test_terms_are_checked(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(Invalid, match=why):
        SecureTerms(**settings)


def test_more_than_half_and_never_more_than_all_must_stay() -> None:
    for nodes in range(3, 60):
        for share in (0.5, 0.6, 2 / 3, 0.9, 0.999):
            needed = SecureTerms(threshold=share).needed(nodes)
            assert nodes / 2 < needed <= nodes
        assert TERMS.needed(nodes) <= nodes - nodes // 3  # a third may go
