"""What every algorithm must keep to, run on every recipe that the catalogue finds.

A new recipe is picked up by its file name. Where it must be built with options, or departs from the contract on
purpose, it says so in `tests/declared.py`, with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from declared import CLIENTS, DECLARED, Declared, build, model_of, representatives

from consilience import algorithms
from consilience.core import plans, tree
from consilience.core.capabilities import PreTrainingPass
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.notebook import LINE
from consilience.core.rounds import Round, run
from consilience.core.settings import options_of
from consilience.core.tree import Tree
from consilience.engines.compiler import fuse, in_place
from consilience.engines.vectorised import program, traced
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.selection import Uniform

TOLERANCE = 1e-12
SOME = Uniform(count=3)
# tracing a step takes longer than these runs; `test_traced_steps_give_the_same_bits` turns it on
pytestmark = pytest.mark.usefixtures("untraced")


each_recipe = pytest.mark.parametrize("name", algorithms.names())
# one recipe for each kind of program that a lane meets; the others of the kind run in a second lane once
KINDS = representatives()
each_kind = pytest.mark.parametrize("name", KINDS)
# every recipe with buffers and dropout in one lane; one recipe of each kind also in the other, without buffers
each_recipe_in_lanes = pytest.mark.parametrize(
    ("name", "model", "lane"),
    [*((name, "convnet", "serial") for name in algorithms.names()), *((name, "mlp", "batched") for name in KINDS)],
)


@pytest.fixture(autouse=True)
def _excused(request: pytest.FixtureRequest) -> None:
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    reason = DECLARED.get(str(name), Declared()).excused.get(request.node.originalname)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


@functools.cache
def train(name: str, model: str, *, rounds: int = 3, seed: int = 1, **options: Any) -> list[Round]:
    """All rounds of a run, shared by the tests; `selection` goes to the recipe, the rest to the engine."""
    recipe_options = {key: options.pop(key) for key in ("selection",) if key in options}
    engine = tiny.engine(model_of(name, model), **options)
    return list(run(build(name, **recipe_options), engine, rounds=rounds, seed=seed, max_bad_rounds=99))


def train_some(name: str, model: str, lane: str = "serial") -> list[Round]:
    """Four rounds in which three of the five clients take part."""
    return train(name, model, rounds=4, selection=SOME, lane=lane)


def assert_close(runs: list[Round], others: list[Round], tolerance: float = TOLERANCE) -> None:
    """Same models, replies, weights, states and memories in every round."""
    assert len(runs) == len(others)
    for one, other in zip(runs, others):
        assert tiny.gap(one.model, other.model) <= tolerance
        assert tiny.gap(one.cohort.reply, other.cohort.reply) <= tolerance
        assert tiny.gap(one.snapshot.server, other.snapshot.server) <= tolerance
        assert tiny.gap(one.snapshot.memory, other.snapshot.memory) <= tolerance
        assert one.cohort.ids.tolist() == other.cohort.ids.tolist()
        assert one.cohort.steps.tolist() == other.cohort.steps.tolist()
        assert one.cohort.counts == other.cohort.counts
        np.testing.assert_allclose(one.snapshot.losses, other.snapshot.losses, rtol=0, atol=tolerance)


def assert_identical(runs: list[Round], others: list[Round]) -> None:
    """The same to the last bit."""
    assert_close(runs, others, tolerance=0)
    for one, other in zip(runs, others):
        assert tiny.same(one.model, other.model)
        assert tiny.same(one.snapshot.server, other.snapshot.server)
        assert tiny.same(one.snapshot.memory, other.snapshot.memory)


# --- where it runs does not matter -----------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("lane", ["batched", "streams", "batched-matmul"])
def test_lanes_agree(name: str, lane: str) -> None:
    assert_close(train(name, "convnet", lane=lane), train(name, "convnet"))


@each_recipe
def test_every_recipe_gives_the_same_in_a_second_lane(name: str) -> None:
    assert_close(train(name, "mlp", lane="batched"), train(name, "mlp"))


@each_kind
@pytest.mark.parametrize(("model", "at_once"), [("mlp", 1), ("convnet", 2)])  # all five at once is `test_lanes_agree`
def test_group_size_does_not_matter(name: str, model: str, at_once: int) -> None:
    got = train(name, model, lane="batched", clients_at_once=at_once, rounds=2)
    assert_close(got, train(name, model)[:2])


@each_kind
@pytest.mark.parametrize("lane", ["batched", "streams"])
def test_lanes_agree_on_uneven_work(name: str, lane: str) -> None:
    uneven = Environment(steps=(5, 0, 1, 2, 9), communication=0.8, silent="broadcast_model")
    assert_close(train(name, "convnet", lane=lane, environment=uneven), train(name, "convnet", environment=uneven))


@each_kind
@pytest.mark.parametrize(
    ("lane", "fused"), [("serial", False), ("serial", True), ("batched", False), ("streams", False)]
)
def test_traced_steps_give_the_same_bits(name: str, lane: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "InPlace", functools.partial(in_place.InPlace, fused=fused))
    monkeypatch.setattr(fuse, "FEWEST", 2)
    even = Environment(steps=(2,) * CLIENTS)  # few shapes to trace
    plain = train(name, "convnet", lane=lane, environment=even, rounds=2)
    monkeypatch.setattr(program, "HOT", 0)
    monkeypatch.setattr(traced, "HOT", 0)
    engine = tiny.engine(model_of(name, "convnet"), lane=lane, environment=even)
    got = list(run(build(name), engine, rounds=2, seed=1))
    made = next(found for (rule, _), found in engine._programs.items() if rule.work.trains)
    assert (made.group if lane == "batched" else made.one).traced, "nothing was traced"
    assert made.begin._traced and made.end._traced
    assert_identical(got, plain)


# --- trees keep their shape, inputs are not touched ------------------------------------------------------------------


def lasting(state: tree.Tree) -> dict[str, Any]:
    """The structure of a server's state; models held for the participants are as many as those were."""
    held = ("held/", "holders")
    found = tiny.structure(state).items()
    return {path: (shape[1:] if path.startswith(held) else shape, dtype) for path, (shape, dtype) in found}


@each_recipe
def test_replies_memories_and_states_keep_their_structure(name: str) -> None:
    runs = train_some(name, "convnet")
    start = tiny.engine(model_of(name, "convnet")).start()
    first = runs[0]
    for one in runs:
        assert tiny.structure(tree.rows(one.cohort.reply, 0)) == tiny.structure(tree.rows(first.cohort.reply, 0))
        assert {len(leaf) for leaf in tree.leaves(one.cohort.reply)} == {len(one.cohort)}
        assert lasting(one.snapshot.server) == lasting(first.snapshot.server)
        assert tiny.structure(one.snapshot.memory) == tiny.structure(first.snapshot.memory)
        assert {len(leaf) for leaf in tree.leaves(one.snapshot.memory)} <= {CLIENTS}
        assert tiny.structure(one.model) == tiny.structure(start)
        assert tiny.finite(one.model) and tiny.finite(one.snapshot.server) and tiny.finite(one.snapshot.memory)


@each_recipe_in_lanes
def test_inputs_are_not_modified(name: str, model: str, lane: str) -> None:
    data = tiny.federation()
    rows = {"x": data.train.x, "y": data.train.y, "starts": data.train.starts, "sizes": data.train.sizes}
    engine = tiny.engine(model_of(name, model), data, lane=lane)
    start = engine.start()
    module = dict(engine.task.module.state_dict())
    before = tree.clone({"rows": rows, "start": start, "module": module})
    snapshots, copies = [], []
    for one in run(build(name), engine, rounds=3, seed=1, start=start):
        snapshots.append({"server": one.snapshot.server, "memory": one.snapshot.memory, "reply": one.cohort.reply})
        copies.append(tree.clone(snapshots[-1]))
    assert tiny.same(before, {"rows": rows, "start": start, "module": module})
    for held, copied in zip(snapshots, copies):  # a snapshot that is kept is not changed by later rounds
        assert tiny.same(held, copied)
    assert not tiny.same(snapshots[0]["server"], snapshots[-1]["server"]), "nothing was learned"


@each_recipe
def test_server_update_is_pure(name: str) -> None:
    server = build(name).server
    state, cohort = _before_and_cohort(name, "convnet")
    before, reply, examples = tree.clone(state), tree.clone(cohort.reply), cohort.examples.clone()
    first, _ = server.update(state, cohort)
    second, _ = server.update(state, cohort)
    assert tiny.same(first, second)
    assert tiny.same(state, before) and tiny.same(cohort.reply, reply) and torch.equal(cohort.examples, examples)


@each_recipe
def test_client_step_is_pure(name: str) -> None:
    rule, server = build(name).client, build(name).server
    engine = tiny.engine(model_of(name, "convnet"))
    ids = np.arange(CLIENTS)
    broadcast = server.broadcast(server.init(engine.start(), CLIENTS), ids)
    message = _message(broadcast, 3)
    memory = rule.init(engine.start())
    if isinstance(rule, PreTrainingPass):
        look = rule.pre_training
        message["seen"], _ = look.end(engine.task, look.begin(engine.task, message, {}), message, {})
    plan = plans.draw(rule.work, engine.store(rule.work.rows), ids[3:4], np.array([2]), seed=1, round=0)
    batch = plan.single(0, 0, engine.store(rule.work.rows))
    carry = rule.begin(engine.task, message, memory)
    inputs = {"carry": carry, "message": message, "memory": memory, "batch": {"x": batch.x, "y": batch.y}}
    before = tree.clone(inputs)
    once = rule.step(engine.task, carry, batch, message, memory)
    twice = rule.step(engine.task, carry, batch, message, memory)
    assert tiny.same(once, twice)
    assert tiny.structure(once) == tiny.structure(carry)
    ends = [rule.end(engine.task, once, message, memory) for _ in range(2)]
    assert tiny.same(ends[0][0], ends[1][0]) and tiny.same(ends[0][1], ends[1][1])
    assert tiny.structure(ends[0][1]) == tiny.structure(memory)
    assert tiny.same(inputs, before)


# --- the order of clients does not matter ----------------------------------------------------------------------------


@each_recipe
def test_permuting_a_cohort_gives_the_same_model(name: str) -> None:
    server = build(name).server
    state, cohort = _before_and_cohort(name, "convnet")
    index = np.array([2, 0, 4, 1, 3])
    permuted = Cohort(
        reply=tree.rows(cohort.reply, torch.from_numpy(index)),
        ids=cohort.ids[index],
        examples=cohort.examples[torch.from_numpy(index)],
        steps=cohort.steps[index],
        round=cohort.round,
        seed=cohort.seed,
    )
    expected, _ = server.update(state, cohort)
    got, _ = server.update(state, permuted)
    assert tiny.gap(got, expected) <= TOLERANCE


@each_recipe
def test_needs_each_reply_is_truthful(name: str) -> None:
    server = build(name).server
    if server.needs_each_reply:
        pytest.skip("it says that it looks at single replies")
    state, cohort = _before_and_cohort(name, "convnet")
    expected, notes = server.update(state, cohort)
    share = notes.get("weights", cohort.examples / cohort.examples.sum())

    def summed(stacked: torch.Tensor) -> torch.Tensor:
        if not stacked.is_floating_point():
            return stacked.amax(0).expand_as(stacked)
        return torch.einsum("m,m...->...", share.to(stacked.dtype), stacked).expand_as(stacked)

    blurred = dataclasses.replace(cohort, reply=tree.map_leaves(summed, cohort.reply))
    got, again = server.update(state, blurred)
    assert tiny.gap(server.model(got), server.model(expected)) <= TOLERANCE
    if "weights" in notes:  # they depend on example counts alone, so that they can be agreed on before a secure sum
        assert torch.equal(again["weights"], notes["weights"])


# --- exact resume, exact repetition ----------------------------------------------------------------------------------


@each_recipe_in_lanes
def test_resume_is_exact(name: str, model: str, lane: str) -> None:
    whole = train_some(name, model, lane)
    held = whole[1].snapshot
    saved = dataclasses.replace(
        held, server=tree.clone(held.server), memory=tree.clone(held.memory), losses=held.losses.copy()
    )
    engine = tiny.engine(model_of(name, model), lane=lane)
    rest = list(run(build(name, selection=SOME), engine, rounds=4, seed=1, resume=saved))
    assert [one.number for one in rest] == [3, 4]
    assert_identical(rest, whole[2:])


@each_recipe
def test_same_seed_same_bits_other_seed_other_model(name: str) -> None:
    options = {"lane": "batched"} if name in KINDS else {}  # runs that other tests have, too
    first = train(name, "convnet", **options)
    assert_identical(train.__wrapped__(name, "convnet", **options), first)
    assert not tiny.same(train(name, "convnet", seed=2, rounds=1)[-1].model, first[0].model)


@each_recipe
def test_one_engine_serves_several_runs(name: str) -> None:
    engine = tiny.engine(model_of(name, "convnet"))
    algorithm = build(name)
    list(run(algorithm, engine, rounds=1, seed=2))
    assert_identical(list(run(algorithm, engine, rounds=2, seed=1)), train(name, "convnet")[:2])


# --- what is missing or idle does no harm ----------------------------------------------------------------------------


SILENT_AND_IDLE, DROPOUT = {"communication": 0.5, "steps": (0, 2, 0, 3, 1)}, {"dropout": 0.5}
# to a rule, a client that drops out is one that is silent: once for each kind
in_trouble = [
    *((name, SILENT_AND_IDLE, silent) for name in algorithms.names() for silent in ("broadcast_model", "renormalise")),
    *((name, DROPOUT, "renormalise") for name in KINDS),
]


@pytest.mark.parametrize(("name", "trouble", "silent"), in_trouble)
def test_dropped_and_idle_clients_leave_sound_values(name: str, trouble: dict[str, Any], silent: Any) -> None:
    rounds = train(name, "convnet", rounds=4, environment=Environment(silent=silent, **trouble))
    for one in rounds:
        assert tiny.finite(one.model) and tiny.finite(one.snapshot.server) and tiny.finite(one.snapshot.memory)
        if len(one.cohort) and "weights" in one.notes:
            weights = one.notes["weights"]
            assert weights.shape == (len(one.cohort),) and bool((weights >= 0).all())
            assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    assert sum(one.cohort.counts.get("silent", 0) for one in rounds) > 0
    full = [len(one.cohort) == CLIENTS for one in rounds]
    assert all(full) if silent == "broadcast_model" else not all(full)


@each_recipe
def test_a_round_in_which_nobody_answers_changes_nothing(name: str) -> None:
    dead = Environment(communication=0.0, silent="renormalise")
    start = tiny.engine(model_of(name, "convnet")).start()
    before = build(name).server.init(start, CLIENTS)
    for one in train(name, "convnet", rounds=2, environment=dead):
        assert tiny.same(one.snapshot.server, before)
        assert one.cohort.counts == {"silent": CLIENTS} and len(one.cohort) == 0
        assert one.bytes_up == 0


@each_recipe
def test_broadcast_models_in_place_of_all_replies_keep_the_model(name: str) -> None:
    dead = Environment(communication=0.0, silent="broadcast_model")
    start = tiny.engine(model_of(name, "convnet")).start()
    for one in train(name, "convnet", rounds=2, environment=dead):
        assert tiny.gap(one.model, start) <= TOLERANCE
        assert one.cohort.steps.tolist() == [0] * CLIENTS


@each_recipe
def test_clients_without_steps_send_back_what_they_got(name: str) -> None:
    start = tiny.engine(model_of(name, "convnet")).start()
    for one in train(name, "convnet", rounds=2, environment=Environment(steps=(0,) * CLIENTS)):
        assert tiny.gap(one.model, start) <= TOLERANCE


# --- records ---------------------------------------------------------------------------------------------------------


@each_recipe
def test_bytes_match_the_trees(name: str) -> None:
    algorithm = build(name)
    rounds = train_some(name, "convnet")[:2]
    state = algorithm.server.init(tiny.engine(model_of(name, "convnet")).start(), CLIENTS)
    for one in rounds:
        sent = algorithm.server.broadcast(state, one.chosen)
        assert one.bytes_down == len(one.chosen) * _bytes(sent.shared) + _bytes(sent.personal)
        assert one.bytes_up == _bytes(one.cohort.reply)
        state = one.snapshot.server


@each_recipe
def test_repr_rebuilds_an_equal_algorithm(name: str) -> None:
    for algorithm in (build(name), algorithms.recipe(name)(**DECLARED.get(name, Declared()).options)):
        again = eval(algorithm.spelled(), _part_classes(algorithm))
        assert again == algorithm
        assert again.spelled() == algorithm.spelled()
        assert len(repr(algorithm)) <= LINE == 100 and not repr(algorithm).endswith("...")
        assert hash(again) == hash(algorithm)


@each_recipe
def test_every_option_has_an_annotation(name: str) -> None:
    for option in options_of(algorithms.recipe(name)).values():
        assert option.annotation is not Any


def _before_and_cohort(name: str, model: str) -> tuple[Tree, Cohort]:
    """The server state before the last round of a run, and the replies it met."""
    rounds = train(name, model)
    return rounds[-2].snapshot.server, rounds[-1].cohort


def _message(broadcast: Broadcast, place: int) -> Tree:
    return {**broadcast.shared, **tree.rows(broadcast.personal, place), "round": torch.tensor(0)}


def _bytes(value: Tree) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(value))


def _part_classes(part: Any) -> dict[str, type]:
    """Every dataclass inside an algorithm, by name."""
    if isinstance(part, tuple):
        found: dict[str, type] = {}
        for member in part:
            found.update(_part_classes(member))
        return found
    if not dataclasses.is_dataclass(part):
        return {}
    found = {type(part).__name__: type(part)}
    for f in dataclasses.fields(part):
        found.update(_part_classes(getattr(part, f.name)))
    return found


def test_the_catalogue_finds_the_first_algorithms() -> None:
    assert {"fedavg", "fedprox", "simprox"} <= set(algorithms.names())
    assert set(DECLARED) <= set(algorithms.names()), "DECLARED names a recipe that does not exist"
    assert isinstance(tiny.engine(), Vectorised)


def test_an_unknown_algorithm_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"algorithm 'fedprx' is unknown \(did you mean 'fedprox'\?\)"):
        algorithms.recipe("fedprx")
