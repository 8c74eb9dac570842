"""Caps on weights: hand-computed cases, properties, clones of one client, the config, and other engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience import algorithms
from consilience.core.exchange import Cohort
from consilience.core.rounds import Diverged, run
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments.config.catalogue import KINDS
from consilience.experiments.config.config import load
from consilience.options.parts import build, write
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.weighting.by_size import ByExamples, UniformWeights
from consilience.server.averaging.weighting.capped import CappedWeights, capped_shares, connected
from consilience.server.averaging.weighting.dual import DualWeights
from consilience.server.averaging.weighting.simprox import SimProxWeights
from consilience.server.protocols import Weighting, read_by
from consilience.task.task import Task


def cohort_of(updates: Any, examples: Any = None) -> Cohort:
    """Replies that moved by these updates from a model of ones."""
    moved = torch.as_tensor(np.asarray(updates, dtype=np.float64))
    counts = torch.ones(len(moved), dtype=torch.float64) if examples is None else torch.tensor(examples).double()
    return Cohort(
        reply={"model": {"params": {"a": moved[:, :1] + 1, "b": moved[:, 1:] + 1}, "buffers": {}}},
        ids=np.arange(len(moved)),
        examples=counts,
        steps=np.ones(len(moved), dtype=np.int64),
        round=3,
    )


def model_of(size: int) -> Any:
    ones = torch.ones(size, dtype=torch.float64)
    return {"params": {"a": ones[:1], "b": ones[1:]}, "buffers": {}}


def weigh(rule: Weighting, updates: Any, examples: Any = None) -> np.ndarray:
    weights, state, _ = rule.weigh(cohort_of(updates, examples), model_of(len(updates[0])), {})
    assert state == {} and weights.dtype == torch.float64
    return weights.numpy()


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_what_is_above_a_clients_cap_goes_to_the_others_in_proportion() -> None:
    rule = CappedWeights(max_client=0.4)
    assert weigh(rule, np.eye(3), [60, 30, 10]) == pytest.approx([0.4, 0.4, 0.2])  # 0.45 is again above: second pass
    assert weigh(rule, np.eye(4), [60, 20, 10, 10]) == pytest.approx([0.4, 0.3, 0.15, 0.15])
    unmoved = weigh(rule, np.eye(3), [40, 35, 25])
    assert np.array_equal(unmoved, weigh(ByExamples(), np.eye(3), [40, 35, 25]))  # not a bit, where no cap matters


def test_not_a_bit_changes_where_no_cap_matters() -> None:
    """Dividing by the sum and multiplying by it again would change some."""
    draw = np.random.default_rng(0)
    for _ in range(50):
        rows = draw.integers(50, 100, size=7).tolist()
        given = weigh(ByExamples(), np.eye(7), rows)
        assert np.array_equal(weigh(CappedWeights(max_client=0.9), np.eye(7), rows), given)
        assert np.array_equal(weigh(CappedWeights(max_client=0.9, max_group=0.9), np.eye(7), rows), given)


def test_what_is_above_a_groups_cap_goes_to_the_others() -> None:
    rule = CappedWeights(inner=UniformWeights(), max_group=0.3)
    updates = [[1, 0, 0, 0], [2, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]  # 3 of one direction
    assert weigh(rule, updates) == pytest.approx([0.1, 0.1, 0.1, 0.7 / 3, 0.7 / 3, 0.7 / 3])
    by_size = CappedWeights(max_group=0.3)
    assert weigh(by_size, updates, [4, 1, 1, 1, 1, 2]) == pytest.approx([0.2, 0.05, 0.05, 0.2, 0.2, 0.3])


def test_both_caps_hold_together() -> None:
    # group {0, 1} may have 0.5, and of that client 0 no more than 0.4
    found = capped_shares(np.array([0.8, 0.04, 0.08, 0.08]), np.array([0, 0, 2, 3]), 0.4, 0.5)
    assert found == pytest.approx([0.4, 0.1, 0.25, 0.25])
    # the excess of the group lifts client 2 to its own cap, and the rest of it goes to client 3
    found = capped_shares(np.array([0.4, 0.4, 0.15, 0.05]), np.array([0, 0, 2, 3]), 0.35, 0.4)
    assert found == pytest.approx([0.2, 0.2, 0.35, 0.25])


def test_groups_are_what_near_identical_updates_connect() -> None:
    alike = np.eye(5, dtype=bool)
    alike[4, 2] = alike[2, 4] = alike[0, 2] = alike[2, 0] = True
    assert connected(alike).tolist() == [0, 1, 0, 3, 0]
    still = [[0, 0], [0, 0], [0, 1], [1, 0]]  # who did not move has no direction, but is the same as another such
    rule = CappedWeights(inner=UniformWeights(), max_group=0.34)
    weights, _, notes = rule.weigh(cohort_of(still), model_of(2), {})
    assert notes["near_groups"].tolist() == [0, 0, 2, 3] and int(notes["capped"]) == 2
    assert weights.tolist() == pytest.approx([0.17, 0.17, 0.33, 0.33])


def test_near_is_a_cosine() -> None:
    updates = [[1, 0, 0], [np.cos(0.2), np.sin(0.2), 0], [0, 0, 1], [0, -1, 0]]
    for near, expected in ((0.98, [0.2, 0.2, 0.3, 0.3]), (0.981, [0.25] * 4)):  # cos 0.2 = 0.98007
        assert weigh(CappedWeights(inner=UniformWeights(), max_group=0.4, min_cosine=near), updates) == pytest.approx(
            expected
        )


def test_clients_of_weight_zero_keep_it_and_totals_other_than_one_stay() -> None:
    assert weigh(CappedWeights(max_client=0.5), np.eye(3), [0, 3, 1]) == pytest.approx([0, 0.5, 0.5])

    class Doubled:
        needs_each_reply = False

        def init(self, start: Any, clients: int) -> Any:
            return {}

        def weigh(self, cohort: Cohort, model: Any, state: Any) -> Any:
            return 2 * cohort.examples / cohort.examples.sum(), state, {}

    assert weigh(CappedWeights(inner=Doubled(), max_client=0.5), np.eye(3), [6, 3, 1]) == pytest.approx([1, 0.75, 0.25])


# --- properties ------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, float, float]:
    """(shares, groups, caps) that are feasible, often only just."""
    count = draw(st.integers(1, 12))
    given_ = np.array(draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))) ** draw(st.integers(1, 60))
    if not given_.sum() > 0:
        given_ = np.ones(count)
    first = np.array(draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count)))
    labels = np.array([int(np.flatnonzero(first == label)[0]) for label in first])
    sizes = np.unique(labels[given_ > 0], return_counts=True)[1]
    client = draw(st.floats(0.01, 1))
    group = draw(st.floats(0.01, 1))
    room = np.minimum(client * sizes, group).sum()
    if room < 1:
        client, group = client / room, group / room
    return given_ / given_.sum(), labels, client, group


@given(problems())
def test_shares_sum_to_one_no_cap_is_exceeded_and_nothing_moves_without_need(
    problem: tuple[np.ndarray, np.ndarray, float, float],
) -> None:
    shares, labels, client, group = problem
    found = capped_shares(shares, labels, client, group)
    sums = np.array([found[labels == label].sum() for label in labels])
    assert found.sum() == pytest.approx(1, abs=1e-9) and found.min() >= 0
    assert (found <= client + 1e-9).all() and (sums <= group + 1e-9).all()
    assert (found[shares == 0] == 0).all()
    before = np.array([shares[labels == label].sum() for label in labels])
    if (shares <= client).all() and (before <= group).all():
        assert np.abs(found - shares).max() < 1e-9
    # those below their caps share one factor, which is the largest of all
    free = (found < client - 1e-9) & (sums < group - 1e-9) & (shares > 1e-12)
    if free.any():
        factor = found[free] / shares[free]
        assert factor.max() == pytest.approx(factor.min(), rel=1e-6) and factor.min() >= 1 - 1e-9
        others = ~free & (shares > 1e-12)
        assert (found[others] / shares[others] <= factor.max() * (1 + 1e-6)).all()


@given(problems(), st.randoms(use_true_random=False))
def test_renumbering_clients_renumbers_the_shares(
    problem: tuple[np.ndarray, np.ndarray, float, float], chance: Any
) -> None:
    shares, labels, client, group = problem
    order = np.array(chance.sample(range(len(shares)), len(shares)))
    again = capped_shares(shares[order], labels[order], client, group)
    assert np.abs(again - capped_shares(shares, labels, client, group)[order]).max() < 1e-9


@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(0, 6), st.booleans())
def test_whole_rule_on_random_clients_with_clones(seed: int, honest: int, clones: int, softmax: bool) -> None:
    draw = np.random.default_rng(seed)
    updates = draw.normal(size=(honest, 20))
    updates = np.concatenate([updates, np.repeat(updates[:1], clones, 0)])
    rule = CappedWeights(inner=SimProxWeights(softmax=softmax), max_client=0.5, max_group=0.3, if_infeasible="loosen")
    weights, _, notes = rule.weigh(cohort_of(updates), model_of(20), {})
    factor = float(notes["loosened"])
    assert float(weights.sum()) == pytest.approx(1, abs=1e-9)
    assert notes["near_groups"].tolist() == [*range(honest), *[0] * clones]
    ours = float(weights[0] + weights[honest:].sum())
    assert ours <= 0.3 * factor + 1e-9 and float(weights.max()) <= 0.5 * factor + 1e-9
    assert factor == pytest.approx(max(1, 1 / (0.3 * honest)))  # honest groups of at most 0.3 each
    order = draw.permutation(len(updates))
    assert np.abs(weigh(rule, updates[order]) - weights.numpy()[order]).max() < 1e-9


# --- refusals --------------------------------------------------------------------------------------------------------


def test_caps_that_can_never_hold_are_refused_at_the_start() -> None:
    start = model_of(3)
    with pytest.raises(Invalid, match=r"client = 0\.05 cannot hold: 10 clients .* at least 1/10 = 0\.1 is needed"):
        CappedWeights(max_client=0.05).init(start, 10)
    with pytest.raises(Invalid, match=r"group = 0\.2 cannot hold: 4 clients .* at least 1/4 = 0\.25"):
        CappedWeights(max_client=1.0, max_group=0.2).init(start, 4)
    assert CappedWeights(max_client=0.05, if_infeasible="loosen").init(start, 10) == {}
    assert CappedWeights(max_client=0.1).init(start, 10) == {}
    for options, words in (
        ({}, "has no effect"),
        ({"max_client": 0.0}, "max_client = 0"),
        ({"max_client": 1.5}, "max_client = 1.5"),
        ({"max_group": -1}, "max_group = -1"),
        ({"max_group": 0.5, "min_cosine": 2}, "min_cosine = 2"),
    ):
        with pytest.raises(Invalid, match=words):
            CappedWeights(**options)


def test_caps_that_a_round_cannot_keep_stop_the_run_with_what_would_do() -> None:
    updates = [[1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0]]  # two groups, of which each may have 0.4
    rule = CappedWeights(inner=UniformWeights(), max_client=0.5, max_group=0.4)
    with pytest.raises(Diverged) as stopped:
        weigh(rule, updates)
    assert "round 4: the caps" in str(stopped.value) and "4 replies of positive weight in 2 groups" in str(
        stopped.value
    )
    assert "may have 0.8 of 1 together" in str(stopped.value)
    assert "max_client = 0.625, max_group = 0.5 would do" in str(stopped.value)
    assert weigh(CappedWeights(inner=UniformWeights(), max_client=0.625, max_group=0.5), updates) == pytest.approx(
        [1 / 6, 1 / 6, 1 / 6, 0.5]
    )
    loose = CappedWeights(inner=UniformWeights(), max_client=0.5, max_group=0.4, if_infeasible="loosen")
    assert weigh(loose, updates) == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0.5])


def test_negative_weights_are_refused() -> None:
    with pytest.raises(Diverged, match="caps need weights of at least 0"):
        weigh(CappedWeights(inner=DualWeights(compare_on="updates"), max_client=0.9), [[3.0, 0], [2.0, 0], [-1.0, 0]])


# --- clones against SimProx (FAULTS row 60) --------------------------------------------------------------------------


def test_row_60_clones_take_over_simprox_and_are_held_to_the_cap() -> None:
    """Seven honest clients agree on a direction; three copies of one hostile client hardly move, all the other way."""
    draw = np.random.default_rng(0)
    honest = draw.normal(size=(7, 50)) + 1
    hostile = np.repeat(-0.01 * np.ones((1, 50)), 3, 0)
    updates = np.concatenate([honest, hostile])
    sharp = SimProxWeights(softmax=False)
    taken = weigh(sharp, updates)
    assert taken[7:].sum() > 0.99  # exp(-|w_i - w|) believes who stays where it was
    held = weigh(CappedWeights(inner=sharp, max_client=0.25, max_group=0.2), updates)
    assert held[7:].sum() == pytest.approx(0.2) and held.max() <= 0.25 + 1e-12
    assert (taken @ updates).mean() < 0 < (held @ updates).mean()  # the average goes their way, and then it does not

    crowd = np.concatenate([honest[:3], np.repeat(hostile[:1], 7, 0)])  # the paper's softmax, but a majority of clones
    assert weigh(SimProxWeights(), crowd)[3:].sum() > 0.7
    assert weigh(CappedWeights(inner=SimProxWeights(), max_group=0.26), crowd)[3:].sum() == pytest.approx(0.26)


def test_own_similarity_is_left_out_so_that_a_copy_gains_little() -> None:
    draw = np.random.default_rng(1)
    for copies in (2, 3, 5) * 20:
        updates = draw.normal(size=(10, 30))
        updates[:copies] = updates[0]
        updates /= np.linalg.norm(updates, axis=1, keepdims=True)  # all move equally far: only similarities differ
        assert abs(weigh(SimProxWeights(), updates)[:copies].sum() - copies / 10) < 0.005


# --- where it is used ------------------------------------------------------------------------------------------------


def test_the_parts_it_wraps_are_asked_for_what_they_need() -> None:
    assert not CappedWeights(max_client=0.5).needs_each_reply and CappedWeights(max_group=0.5).needs_each_reply
    assert CappedWeights(inner=SimProxWeights(), max_client=0.5).needs_each_reply
    own = CappedWeights(inner=SimProxWeights(previous_model="own"), max_client=0.5)
    assert read_by(own) == ("moved",)
    made = algorithms.recipe("simprox")(weighting=own)
    assert [type(part).__name__ for part in made.client.memory] == ["PreviousModel"]


def test_from_a_config_and_back() -> None:
    table = {"name": "capped", "inner": {"name": "simprox", "tau": 0.3}, "max_client": 0.3, "max_group": 0.4}
    rule = build("algorithm.weighting", table, Weighting)
    assert rule == CappedWeights(inner=SimProxWeights(tau=0.3), max_client=0.3, max_group=0.4)
    assert build("algorithm.weighting", write(rule), Weighting) == rule
    config = load(overrides=["algorithm.name=simprox", f"algorithm.weighting={_inline(table)}"])
    server = KINDS["algorithm"].build(config.algorithm.name, config.algorithm.options).server
    assert isinstance(server, Averaging) and server.weighting == rule
    with pytest.raises(Invalid, match="did you mean 'max_client'"):
        build("algorithm.weighting", {"name": "capped", "clients": 0.3}, Weighting)


def _inline(table: dict[str, Any]) -> str:
    inner = table["inner"]
    return (
        f"{{name='capped', inner={{name='simprox', tau={inner['tau']}}}, "
        f"max_client={table['max_client']}, max_group={table['max_group']}}}"
    )


@pytest.mark.usefixtures("untraced")
def test_a_run_in_which_caps_matter_is_the_same_over_flower() -> None:
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')
    from flower_loopback import Loopback, apps

    from consilience.flower.engine.engine import FlowerEngine

    rule = CappedWeights(inner=ByExamples(), max_client=0.25, max_group=0.25, min_cosine=0.9, if_infeasible="loosen")
    recipe = algorithms.recipe("fedavg")(lr=0.1, batch_size=4, weighting=rule)
    task = lambda: Task(tiny.MODELS["mlp"]())  # noqa: E731
    shares = [[0, 1], [2], [3, 4]]
    grid = Loopback(apps(recipe, task, tiny.federation(), shares))
    there = FlowerEngine(grid, task(), recipe, clients=5, run="a-run", dtype="float64")
    there.meet()
    here = Vectorised(task(), tiny.federation(), dtype="float64", lane="serial", device="cpu")
    one, other = (list(run(recipe, engine, rounds=2, seed=5)) for engine in (here, there))
    assert all(tiny.same(mine.model, yours.model) for mine, yours in zip(one, other))
    assert all(int(found.notes["capped"]) >= 1 for found in one)
    assert all(float(found.notes["weights"].sum()) == pytest.approx(1) for found in one)
