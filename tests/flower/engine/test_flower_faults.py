"""Clients that are silent, late, lost, lying or gone, in front of a Grid that really serialises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from declared import CLIENTS, build

from consilience.core.rounds import Round, run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.task.task import Task

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from flower_loopback import Loopback, apps

from consilience.core.rounds import TooFewClients
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.flower.engine.engine import FlowerEngine
from consilience.flower.engine.memory import MemoryStore
from consilience.flower.messages import wire
from consilience.flower.messages.mail import Waiting

ALONE = tuple([client] for client in range(CLIENTS))  # one client per node
QUICK = Waiting(deadline=0.4, wait=0.3, retries=1, pause=0.01)
pytestmark = pytest.mark.usefixtures("untraced")


def task() -> Task:
    return Task(tiny.MODELS["mlp"]())


def grid_of(name: str, **settings: Any) -> Loopback:
    return Loopback(apps(build(name), task, tiny.federation(), ALONE, **settings))


def engine_on(grid: Loopback, name: str, **settings: Any) -> FlowerEngine:
    options = {"dtype": "float64", "min_available": 1, "waiting": QUICK, **settings}
    engine = FlowerEngine(grid, task(), build(name), clients=CLIENTS, run="a-run", **options)
    engine.meet()
    return engine


def node_of(grid: Loopback, client: int) -> int:
    return sorted(grid.apps)[client]


def in_process(name: str, rounds: int, environment: Environment | None = None) -> list[Round]:
    engine = Vectorised(
        task(), tiny.federation(), environment=environment, dtype="float64", lane="serial", device="cpu"
    )
    return list(run(build(name), engine, rounds=rounds, seed=5))


# --- silent, late, gone ----------------------------------------------------------------------------------------------


def test_a_silent_client_is_cut_at_the_deadline_and_its_late_reply_is_refused() -> None:
    grid = grid_of("fedavg")
    engine = engine_on(grid, "fedavg")
    grid.late.add(node_of(grid, 3))
    rounds = run(build("fedavg"), engine, rounds=2, seed=5)
    first = next(rounds)
    assert first.cohort.ids.tolist() == [0, 1, 2, 4]
    assert first.cohort.counts["silent"] == 1
    grid.late.clear()
    second = next(rounds)
    assert second.cohort.ids.tolist() == list(range(CLIENTS))
    assert [refusal.reason for refusal in second.cohort.refusals] == ["stale_round"]
    assert second.cohort.counts["stale_round"] == 1 and "silent" not in second.cohort.counts
    engine.count_refused(second.cohort.refusals)
    health = {node["clients"][0]: node for node in engine.node_health}
    assert [health[client]["answered"] for client in range(CLIENTS)] == [2, 2, 2, 1, 2]
    assert [health[client]["refused"] for client in range(CLIENTS)] == [{}, {}, {}, {"stale_round": 1}, {}]
    assert health[3]["node"] == str(node_of(grid, 3)) and all(node["online"] for node in health.values())


def test_a_client_whose_reply_did_not_count_goes_back_to_the_memory_before() -> None:
    """SCAFFOLD's control variate of the late client must be the one the server knows of, not the one it computed."""
    grid = grid_of("scaffold")
    engine = engine_on(grid, "scaffold")
    rounds = run(build("scaffold"), engine, rounds=3, seed=5)
    next(rounds)
    grid.late.add(node_of(grid, 3))
    next(rounds)
    held = [name for name, waiting in grid._waiting.items() if waiting.metadata.dst_node_id == node_of(grid, 3)]
    grid.answer(grid._waiting.pop(held[0]))  # it trains, keeps its memory, and the answer is lost
    grid.late.clear()
    last = next(rounds)

    silent = in_process_without(3, round=1)
    assert tiny.same(last.model, silent.model)
    assert "memory_lost" not in last.cohort.counts


def in_process_without(client: int, round: int) -> Round:
    """The third round of SCAFFOLD where one client was not heard in one round."""

    class Deaf(Environment):
        def reachable(self, now: int, ids: Any, seed: int) -> np.ndarray:
            return ~((np.asarray(ids) == client) & (now == round))

    return in_process("scaffold", 3, Deaf())[-1]


def test_nobody_answers_is_asked_again_then_a_clean_end() -> None:
    grid = grid_of("fedavg")
    engine = engine_on(grid, "fedavg", waiting=Waiting(deadline=0.2, wait=0.3, retries=2, pause=0.01))
    grid.deaf = set(grid.apps)
    before = grid._count
    with pytest.raises(TooFewClients, match="round 1: none of 5 clients sent a usable reply, 3 times in a row"):
        list(run(build("fedavg"), engine, rounds=1, seed=5))
    assert grid._count - before == 3 * CLIENTS


def test_nobody_answers_at_first_but_the_retry_succeeds() -> None:
    grid = grid_of("fedavg")
    engine = engine_on(grid, "fedavg")
    grid.deaf = set(grid.apps)
    present = engine._registry.wait_for

    def heal(least: int) -> np.ndarray:
        if grid._count > 2 * CLIENTS - 1:
            grid.deaf = set()
        return present(least)

    engine._registry.wait_for = heal  # type: ignore[method-assign]
    (only,) = run(build("fedavg"), engine, rounds=1, seed=5)
    assert tiny.same(only.model, in_process("fedavg", 1)[0].model)


def test_too_few_for_ever_ends_with_how_many_were_seen() -> None:
    grid = grid_of("fedavg")
    grid.online = {node_of(grid, 1), node_of(grid, 2)}
    with pytest.raises(TooFewClients, match=r"2 of the 5 clients that are needed were connected after 0.3 seconds"):
        engine_on(grid, "fedavg", min_available=5)


def test_a_client_that_leaves_and_comes_back_as_another_node_is_met_again() -> None:
    grid = grid_of("scaffold")
    engine = engine_on(grid, "scaffold")
    rounds = run(build("scaffold"), engine, rounds=3, seed=5)
    next(rounds)
    old = node_of(grid, 2)
    grid.online.discard(old)
    second = next(rounds)
    assert second.cohort.ids.tolist() == [0, 1, 3, 4] and 2 not in second.chosen
    grid.apps[11], grid.contexts[11] = grid.apps[old], grid.contexts[old]
    grid.online.add(11)
    assert next(rounds).cohort.ids.tolist() == list(range(CLIENTS))


# --- memories --------------------------------------------------------------------------------------------------------


def empty_state(grid: Loopback) -> None:
    from flwr.app import RecordDict

    for context in grid.contexts.values():
        context.state = RecordDict()


def test_lost_memories_are_noticed_counted_and_begun_anew() -> None:
    grid = grid_of("scaffold")
    rounds = run(build("scaffold"), engine_on(grid, "scaffold"), rounds=2, seed=5)
    next(rounds)
    empty_state(grid)
    second = next(rounds)
    assert second.cohort.counts["memory_lost"] == CLIENTS
    assert len(second.cohort) == CLIENTS and tiny.finite(second.model)
    assert not tiny.same(second.model, in_process("scaffold", 2)[-1].model)


@pytest.mark.parametrize("name", ["scaffold", "fedper", "feddyn", "ditto"])
def test_a_resumed_run_finds_memories_on_disk_whatever_flower_forgot(name: str, tmp_path: Path) -> None:
    grid = grid_of(name, memory=tmp_path)
    algorithm = build(name)
    rounds = list(run(algorithm, engine_on(grid, name), rounds=2, seed=5))
    empty_state(grid)  # another Flower run
    resumed = list(run(algorithm, engine_on(grid, name), rounds=3, seed=5, resume=rounds[0].snapshot))
    undisturbed = in_process(name, 3)
    assert tiny.same(resumed[-1].model, undisturbed[-1].model)
    assert all("memory_lost" not in each.cohort.counts for each in resumed)
    files = list(tmp_path.glob("a-run/client-*/*.safetensors"))
    assert files and all(len(list(file.parent.iterdir())) <= 4 for file in files)


def test_what_is_checkpointed_of_memories_is_their_digests(tmp_path: Path) -> None:
    grid = grid_of("scaffold")
    (only,) = run(build("scaffold"), engine_on(grid, "scaffold"), rounds=1, seed=5)
    memory = only.snapshot.memory
    assert list(memory) == ["digests"] and memory["digests"].shape == (CLIENTS, 32)
    assert memory["digests"].dtype == torch.uint8
    (plain,) = run(build("fedavg"), engine_on(grid_of("fedavg"), "fedavg"), rounds=1, seed=5)
    assert plain.snapshot.memory == {}


def test_a_damaged_memory_on_disk_is_not_used(tmp_path: Path) -> None:
    grid = grid_of("scaffold", memory=tmp_path)
    rounds = list(run(build("scaffold"), engine_on(grid, "scaffold"), rounds=1, seed=5))
    empty_state(grid)
    for file in tmp_path.glob("a-run/client-0/*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    resumed = list(run(build("scaffold"), engine_on(grid, "scaffold"), rounds=2, seed=5, resume=rounds[0].snapshot))
    assert resumed[-1].cohort.counts["memory_lost"] == 1


# --- replies that lie ------------------------------------------------------------------------------------------------


def first_path(content: Any, client: int) -> str:
    return next(iter(content[wire.reply_name(client)]))


def replaced(content: Any, client: int, change: Callable[[torch.Tensor], torch.Tensor], path: str = "") -> None:
    from consilience.wire import arrays

    record = content[wire.reply_name(client)]
    path = path or first_path(content, client)
    one = wire.packed(record)[path]
    record[path] = wire.array_record(
        {path: arrays.to_bytes(change(arrays.from_bytes(one.data, one.shape, one.dtype)))}
    )[path]


def said_otherwise(content: Any, **changes: Any) -> None:
    said = wire.get_json(content, "answer")
    wire.put_json(content, "answer", [{**one, **changes} for one in said])


def filled(content: Any, client: int, value: float) -> None:
    """All of the model is this value, and the digest says so."""
    from consilience.core import tree
    from consilience.wire import arrays
    from consilience.wire.admission import Arrival

    for path in list(content[wire.reply_name(client)]):
        if path.startswith("model/"):
            replaced(content, client, lambda t: torch.full_like(t, value) if t.is_floating_point() else t, path)
    flat = {
        path: arrays.from_bytes(one.data, one.shape, one.dtype)
        for path, one in wire.packed(content[wire.reply_name(client)]).items()
    }
    (said,) = wire.get_json(content, "answer")
    facts = Arrival(**{key: said[key] for key in ("client", "run", "round", "examples", "steps")}).facts
    said_otherwise(content, digest=arrays.digest(tree.unflatten(flat), *facts))


def another_record(name: str, kind: str) -> Callable[[Any], None]:
    """A record of another kind under a name that is expected."""

    def change(content: Any) -> None:
        app = wire.records()
        other = {
            "config": lambda: app.ConfigRecord({"json": "[]", "model/params/1.weight": b"x"}),
            "metric": lambda: app.MetricRecord({"json": 1, "model/params/1.weight": [1.0]}),
            "array": lambda: app.ArrayRecord({"json": app.Array(np.zeros(2))}),
        }
        content.pop(name)
        content[name] = other[kind]()

    return change


LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a changed bit": (lambda content: replaced(content, 3, lambda t: t + 1), "digest"),
    "a scalar": (lambda content: replaced(content, 3, lambda t: t.sum()), "shape"),
    "a wider type": (lambda content: replaced(content, 3, lambda t: t.float()), "dtype"),
    "a missing tensor": (lambda content: content[wire.reply_name(3)].pop(first_path(content, 3)), "missing_key"),
    "no reply": (lambda content: content.pop(wire.reply_name(3)), "missing_key"),
    "an earlier round": (lambda content: said_otherwise(content, round=0), "stale_round"),
    "a later round": (lambda content: said_otherwise(content, round=9), "future_round"),
    "another run": (lambda content: said_otherwise(content, run="b-run"), "other_run"),
    "absurd rows": (lambda content: said_otherwise(content, examples=10**12), "examples"),
    "no rows": (lambda content: said_otherwise(content, examples=-3), "examples"),
    "other steps": (lambda content: said_otherwise(content, steps=99), "steps"),
    "no digest": (lambda content: said_otherwise(content, digest=None), "digest"),
    "no memory digest": (lambda content: said_otherwise(content, memory="../../x"), "memory"),
    "another client": (lambda content: said_otherwise(content, client=1), "identity"),
    "no client": (lambda content: said_otherwise(content, client=[3]), "format"),
    "nothing": (lambda content: content.pop("answer"), "format"),
    "huge values": (lambda content: filled(content, 3, 3e38), "too_large"),
    "values whose squares overflow": (lambda content: filled(content, 3, 1e200), "too_large"),
    "texts for arrays": (another_record("reply.3", "config"), "format"),
    "numbers for arrays": (another_record("reply.3", "metric"), "format"),
    "numbers for an answer": (another_record("answer", "metric"), "format"),
    "arrays for an answer": (another_record("answer", "array"), "format"),
    "no json": (lambda content: content["answer"].__setitem__("json", "{" * 5000), "format"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_name_and_the_round_goes_on(lie: str) -> None:
    change, reason = LIES[lie]
    grid = grid_of("fedavg")
    engine = engine_on(grid, "fedavg")
    rounds = run(build("fedavg"), engine, rounds=2, seed=5)
    next(rounds)

    def tamper(node: int, reply: Any) -> Any:
        if node == node_of(grid, 3):
            change(reply.content)
        return reply

    grid.tamper = tamper
    second = next(rounds)
    assert second.cohort.ids.tolist() == [0, 1, 2, 4]
    assert [refusal.reason for refusal in second.cohort.refusals] == [reason]
    assert second.cohort.counts[reason] == 1 and tiny.finite(second.model)


def test_huge_values_in_every_round_are_as_good_as_silence() -> None:
    grid = grid_of("fedavgm")

    def tamper(node: int, reply: Any) -> Any:
        if node == node_of(grid, 3) and "answer" in reply.content:
            filled(reply.content, 3, 1e30)
        return reply

    engine = engine_on(grid, "fedavgm")
    grid.tamper = tamper
    found = list(run(build("fedavgm"), engine, rounds=4, seed=5))

    class Deaf(Environment):
        def reachable(self, now: int, ids: Any, seed: int) -> np.ndarray:
            return np.asarray(ids) != 3

    for one, other in zip(found, in_process("fedavgm", 4, Deaf()), strict=True):
        assert tiny.same(one.snapshot.server, other.snapshot.server)
        assert one.cohort.counts == {"too_large": 1} and [r.client for r in one.cohort.refusals] == [3]


INTRODUCTIONS: list[Any] = [
    *([], 5, None, "x", {}, {"clients": [3], "train": [3]}),
    *({"agreement": odd, "clients": [3], "train": [3], "test": [3]} for odd in ([], 5, "x", {"a": {}}, None)),
    *(
        {"clients": odd, "train": odd, "test": odd}
        for odd in (3, [[3]], [None], [3.5], {"3": 3}, "333", [10**30], [-1])
    ),
]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("number", range(len(INTRODUCTIONS)))
def test_an_odd_introduction_keeps_its_node_out_and_nobody_else(number: int, keep: bool) -> None:
    grid = grid_of("fedavg")

    def tamper(node: int, reply: Any) -> Any:
        if node == node_of(grid, 3) and "introduction" in reply.content:
            said, odd = wire.get_json(reply.content, "introduction"), INTRODUCTIONS[number]
            wire.put_json(reply.content, "introduction", {**said, **odd} if keep and isinstance(odd, dict) else odd)
        return reply

    grid.tamper = tamper
    engine = engine_on(grid, "fedavg", min_available=4)
    expected = keep and INTRODUCTIONS[number] in ({}, {"clients": [3], "train": [3]})
    assert engine._registry.present().tolist() == [True, True, True, expected, True]


def test_a_reply_is_used_once_even_if_it_comes_twice() -> None:
    grid = grid_of("fedavg")

    def twice(node: int, reply: Any) -> Any:
        if "answer" in reply.content:
            said = wire.get_json(reply.content, "answer")
            wire.put_json(reply.content, "answer", said + said)
        return reply

    grid.tamper = twice
    (only,) = run(build("fedavg"), engine_on(grid, "fedavg"), rounds=1, seed=5)
    assert tiny.same(only.model, in_process("fedavg", 1)[0].model)
    assert only.cohort.counts["duplicate"] == CLIENTS


def test_invented_clients_are_one_refusal_and_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    grid = grid_of("fedavg")
    engine, flooding = engine_on(grid, "fedavg"), node_of(grid, 3)

    def flood(node: int, reply: Any) -> Any:
        if node == flooding and "answer" in reply.content:
            (said,) = wire.get_json(reply.content, "answer")
            invented = [{**said, "client": 1000 + number} for number in range(5000)]
            wire.put_json(reply.content, "answer", [said, *invented])
        if node == flooding and "introduction" in reply.content:
            said = wire.get_json(reply.content, "introduction")
            said["clients"] += range(1000, 6000)
            said["train"] += [1] * 5000
            said["test"] += [1] * 5000
            wire.put_json(reply.content, "introduction", said)
        return reply

    grid.tamper = flood
    with caplog.at_level("INFO", logger="consilience.flower"):
        rounds = list(run(build("fedavg"), engine, rounds=2, seed=5))
        assert engine_on(grid, "fedavg")._registry.present().tolist() == [True, True, True, False, True]
    for one in rounds:
        assert one.cohort.ids.tolist() == [0, 1, 2, 4] and one.cohort.counts["format"] == 1
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "5001 answers for 5 clients" in line]) == 2 and len(lines) < 10


def test_a_node_that_is_refused_again_and_again_is_logged_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    grid = grid_of("fedavg")
    engine = engine_on(grid, "fedavg")
    grid.apps[12], grid.contexts[12] = grid.apps[node_of(grid, 3)], grid.contexts[node_of(grid, 3)]
    grid.online.add(12)
    for _ in range(10):
        engine.available(0, 5)
    assert [record.getMessage() for record in caplog.records].count(
        "introductions: node 12 refused: client [3] is online already"
    ) == 3


# --- who is who ------------------------------------------------------------------------------------------------------


def test_two_nodes_with_one_identity_are_both_kept_out() -> None:
    shares = ([0], [1], [2], [3], [3], [4])
    grid = Loopback(apps(build("fedavg"), task, tiny.federation(), shares))
    engine = engine_on(grid, "fedavg")
    assert engine.available(0, 5).tolist() == [True, True, True, False, True]


def test_a_newcomer_cannot_take_over_a_client_that_is_online() -> None:
    grid = grid_of("fedavg")
    engine = engine_on(grid, "fedavg")
    first = node_of(grid, 3)
    grid.apps[12], grid.contexts[12] = grid.apps[first], grid.contexts[first]
    grid.online.add(12)
    assert engine.available(0, 5).all()
    assert engine._registry.node_of[3] == first


def test_a_node_with_other_settings_is_refused_by_what_differs() -> None:
    others = apps(build("fedprox"), task, tiny.federation(), ALONE)
    grid = Loopback([*apps(build("fedavg"), task, tiny.federation(), ALONE)[:4], others[4]])
    with pytest.raises(TooFewClients, match=r"4 of the 5 .* its settings differ: algorithm"):
        engine_on(grid, "fedavg", min_available=5)


def test_an_app_that_fails_is_a_silent_client() -> None:
    def broken(message: Any, context: Any) -> Any:
        raise RuntimeError("no disk")

    grid = grid_of("fedavg")
    engine = engine_on(grid, "fedavg")
    grid.apps[node_of(grid, 3)] = broken
    (only,) = run(build("fedavg"), engine, rounds=1, seed=5)
    assert only.cohort.ids.tolist() == [0, 1, 2, 4] and only.cohort.counts["silent"] == 1


def test_what_a_client_sees_before_training_stays_at_home() -> None:
    from consilience import algorithms
    from consilience.core.capabilities import PreTrainingPass

    looking = [name for name in algorithms.names() if isinstance(build(name).client, PreTrainingPass)]
    assert looking
    grid = grid_of(looking[0])
    list(run(build(looking[0]), engine_on(grid, looking[0]), rounds=1, seed=5))
    assert grid.kinds.count("train") == CLIENTS and grid.kinds.count("evaluate") == 0


def test_simulated_time_is_refused() -> None:
    with pytest.raises(Invalid, match=r"environment.latency simulates time"):
        engine_on(grid_of("fedavg"), "fedavg", environment=Environment(latency=1.0))


@pytest.mark.parametrize("run_name", ["../away", "/etc", "a/b", "", ".hidden", "a\nb"])
def test_a_server_cannot_name_a_folder_elsewhere(run_name: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="is no name of a run"):
        MemoryStore(state={}, run=run_name, folder=tmp_path)


def test_trees_travel_with_their_order_and_empty_parts() -> None:
    from flwr.app import RecordDict

    given: Tree = {
        "model": {"params": {"b": torch.arange(3.0), "a": torch.ones(2, 0)}, "buffers": {}},
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "flag": torch.tensor(True),
    }
    content = RecordDict()
    wire.put_tree(content, "tree", given)
    found = wire.get_tree(content, "tree")
    assert list(found) == list(given) and list(found["model"]["params"]) == ["b", "a"]
    assert found["model"]["buffers"] == {} and tiny.same(given, found)
