"""DR, FedAdp, FedFa and schedules against numbers worked out by hand or in plain numpy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.exchange import Cohort
from consilience.core.settings import Invalid
from consilience.server.averaging.weighting.by_loss import DrWeights
from consilience.server.averaging.weighting.fedadp import FedAdpWeights
from consilience.server.averaging.weighting.fedfa import FedFaWeights
from consilience.server.averaging.weighting.schedule import ScheduleWeights, save_table


def cohort(models: Any, *, examples: Any = None, ids: Any = None, round: int = 0, **more: Any) -> Cohort:
    """Replies with one parameter vector each."""
    stacked = torch.as_tensor(np.asarray(models, dtype=np.float64))
    m = len(stacked)
    reply = {"model": {"params": {"a": stacked[:, :1], "b": stacked[:, 1:]}, "buffers": {}}}
    said = {name: torch.as_tensor(more.pop(name), dtype=torch.float64) for name in SAID if name in more}
    return Cohort(
        reply={**reply, **said},
        ids=np.arange(m) if ids is None else np.asarray(ids),
        examples=torch.ones(m, dtype=torch.float64) if examples is None else torch.tensor(examples).double(),
        steps=np.asarray(more.pop("steps", np.ones(m, dtype=np.int64))),
        round=round,
        **more,
    )


SAID = ("start_loss", "correct", "rows")


def model_of(w: Any) -> dict[str, Any]:
    w = torch.as_tensor(np.asarray(w, dtype=np.float64))
    return {"params": {"a": w[:1], "b": w[1:]}, "buffers": {}}


# --- DR --------------------------------------------------------------------------------------------------------------


def test_dr_by_hand() -> None:
    """N l^2 = 1 * 4, 2 * 1, 4 * 0.25: 4/7, 2/7, 1/7."""
    replies = cohort(np.zeros((3, 2)), examples=[1, 2, 4], start_loss=[2.0, 1.0, 0.5])
    weights, state, _ = DrWeights(q=1.0).weigh(replies, {}, {})
    np.testing.assert_allclose(weights, [4 / 7, 2 / 7, 1 / 7], rtol=1e-14)
    assert state == {}
    weights, _, _ = DrWeights(q=0.0).weigh(replies, {}, {})  # N l = 2, 2, 2
    np.testing.assert_allclose(weights, [1 / 3] * 3, rtol=1e-14)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.floats(0, 4), st.integers(0, 99))
def test_dr_is_eq_12(losses: list[float], q: float, seed: int) -> None:
    examples = np.random.default_rng(seed).integers(1, 1000, len(losses))
    literal = examples * np.array(losses) ** (q + 1)
    weights, _, _ = DrWeights(q=q).weigh(
        cohort(np.zeros((len(losses), 2)), examples=examples, start_loss=losses), {}, {}
    )
    np.testing.assert_allclose(weights, literal / literal.sum(), rtol=1e-10)


def test_dr_survives_zero_and_huge_losses() -> None:
    for losses in ([0.0, 0.0], [1e200, 1e190], [0.0, 1e-300]):
        weights, _, _ = DrWeights(q=3.0).weigh(cohort(np.zeros((2, 2)), start_loss=losses), {}, {})
        assert bool(weights.isfinite().all()) and float(weights.sum()) == pytest.approx(1, abs=1e-12)


def test_dr_without_losses_names_the_recipe() -> None:
    with pytest.raises(Invalid, match="use the algorithm dr_fedavg"):
        DrWeights().weigh(cohort(np.zeros((2, 2))), {}, {})


# --- FedAdp ----------------------------------------------------------------------------------------------------------


def adp(rounds: list[np.ndarray], examples: np.ndarray, beta: float) -> np.ndarray:
    """Eqs (13)-(15) of the last round, every client in every round; rounds hold accumulated gradients [m, P]."""
    smooth = np.zeros(len(examples))
    for t, g in enumerate(rounds):
        mean = examples @ g / examples.sum()
        cosine = g @ mean / np.linalg.norm(mean) / np.linalg.norm(g, axis=1)
        smooth = (t * smooth + np.arccos(np.clip(cosine, -1, 1))) / (t + 1)
    literal = examples * np.exp(beta * (1 - np.exp(-np.exp(-beta * (smooth - 1)))))
    return literal / literal.sum()


@given(st.integers(0, 999), st.integers(2, 6), st.floats(0.5, 9))
def test_fedadp_is_eqs_13_to_15(seed: int, m: int, beta: float) -> None:
    draw = np.random.default_rng(seed)
    examples = draw.integers(1, 50, m).astype(float)
    rounds = [draw.normal(size=(m, 4)) for _ in range(3)]
    rule, start = FedAdpWeights(beta=beta), model_of(np.zeros(4))
    state = rule.init(start, m)
    for t, g in enumerate(rounds):
        w = draw.normal(size=4)
        weights, state, _ = rule.weigh(cohort(w - 0.05 * g, examples=examples, round=t), model_of(w), state)
        np.testing.assert_allclose(weights, adp(rounds[: t + 1], examples, beta), rtol=1e-8)
    assert state["rounds"].tolist() == [3] * m


def test_fedadp_by_hand() -> None:
    """Gradients (1, 0) and (0, 1) of equal clients: both at 45 degrees to the mean, so equal weights; then 0 and 90."""
    rule, w = FedAdpWeights(beta=7.0), np.zeros(2)
    state = rule.init(model_of(w), 2)
    weights, state, notes = rule.weigh(cohort([[-1.0, 0.0], [0.0, -1.0]]), model_of(w), state)
    np.testing.assert_allclose(notes["angle"], [math.pi / 4] * 2, rtol=1e-12)
    np.testing.assert_allclose(weights, [0.5, 0.5], rtol=1e-12)
    # client 1 sends a zero gradient although it worked: no direction, so the angle counts as 90 degrees
    weights, state, notes = rule.weigh(cohort([[-1.0, 0.0], [0.0, 0.0]], round=1), model_of(w), state)
    np.testing.assert_allclose(notes["angle"], [math.pi / 8, math.pi * 3 / 8], rtol=1e-12)

    def h(angle: float) -> float:
        return 7 * (1 - math.exp(-math.exp(-7 * (angle - 1))))

    ratio = math.exp(h(math.pi / 8) - h(3 * math.pi / 8))
    np.testing.assert_allclose(weights, [ratio / (1 + ratio), 1 / (1 + ratio)], rtol=1e-12)


def test_fedadp_leaves_absent_clients_out_and_their_mean_alone() -> None:
    rule, w = FedAdpWeights(), np.zeros(2)
    state = rule.init(model_of(w), 4)
    replies = cohort(
        [[-1.0, 0.2], [0.0, 0.0], [-1.0, -0.3]], ids=[0, 2, 3], steps=[3, 0, 2], heard=np.array([1, 0, 1]) > 0
    )
    weights, state, _ = rule.weigh(replies, model_of(w), state)
    assert float(weights[1]) == 0 and float(weights.sum()) == pytest.approx(1, abs=1e-12)
    assert state["rounds"].tolist() == [1, 0, 0, 1] and float(state["angle"][2]) == 0
    nobody = cohort(np.zeros((2, 2)), ids=[0, 2], steps=[0, 0], examples=[1, 3])
    weights, after, _ = rule.weigh(nobody, model_of(w), state)
    np.testing.assert_allclose(weights, [0.25, 0.75])
    assert torch.equal(after["angle"], state["angle"]) and torch.equal(after["rounds"], state["rounds"])


# --- FedFa -----------------------------------------------------------------------------------------------------------


def test_fedfa_by_hand() -> None:
    """Accuracies 1/2, 1/4, 1/4: shares the same; -log2 is 1, 2, 2. First round: participations alike."""
    rule = FedFaWeights(gamma=0.5)
    state = rule.init(model_of(np.zeros(2)), 3)
    replies = cohort(np.zeros((3, 2)), correct=[4.0, 2.0, 2.0], rows=[8.0, 8.0, 8.0])
    weights, state, notes = rule.weigh(replies, {}, state)
    np.testing.assert_allclose(notes["accuracy"], [0.5, 0.25, 0.25])
    np.testing.assert_allclose(weights, 0.5 * np.array([0.2, 0.4, 0.4]) + 0.5 / 3, rtol=1e-12)
    assert float(weights[0]) < float(weights[1])  # the most accurate client counts least, whatever the text says
    # clients 0 and 1 come back: participations 2, 2 of 4, -log2(1/2) = 1 each
    replies = cohort(np.zeros((3, 2)), correct=[8.0, 8.0, 0.0], rows=[8.0, 8.0, 8.0], steps=[1, 1, 0], round=1)
    weights, state, _ = rule.weigh(replies, {}, state)
    np.testing.assert_allclose(weights, [0.5, 0.5, 0.0], rtol=1e-12)
    assert state["rounds"].tolist() == [2, 2, 1]
    # all three: shares of 3, 3, 2 out of 8
    replies = cohort(np.zeros((3, 2)), correct=[8.0, 8.0, 8.0], rows=[8.0, 8.0, 8.0], round=2)
    weights, state, _ = FedFaWeights(gamma=0.0).weigh(replies, {}, state)
    content = -np.log2(1 - np.array([3, 3, 2]) / 8)
    np.testing.assert_allclose(weights, content / content.sum(), rtol=1e-12)


def test_fedfa_zero_accuracy_and_single_clients() -> None:
    rule = FedFaWeights(gamma=1.0)
    state = rule.init(model_of(np.zeros(2)), 2)
    weights, _, _ = rule.weigh(cohort(np.zeros((2, 2)), correct=[0.0, 4.0], rows=[4.0, 4.0]), {}, state)
    np.testing.assert_allclose(weights, [1.0, 0.0], atol=1e-12)  # -log2(1e-6) against -log2(1) = 0
    weights, _, _ = rule.weigh(cohort(np.zeros((2, 2)), correct=[0.0, 0.0], rows=[4.0, 4.0]), {}, state)
    np.testing.assert_allclose(weights, [0.5, 0.5], rtol=1e-12)
    alone = cohort(np.zeros((2, 2)), correct=[1.0, 4.0], rows=[4.0, 4.0], steps=[0, 3])
    assert rule.weigh(alone, {}, state)[0].tolist() == [0.0, 1.0]
    nobody = cohort(np.zeros((2, 2)), correct=[1.0, 4.0], rows=[4.0, 4.0], steps=[0, 0], examples=[1, 3])
    assert rule.weigh(nobody, {}, state)[0].tolist() == [0.25, 0.75]
    with pytest.raises(Invalid, match="use the algorithm fedfa"):
        rule.weigh(cohort(np.zeros((2, 2))), {}, state)


# --- a schedule ------------------------------------------------------------------------------------------------------

TABLE = ((0.1, 0.2, 0.7), (0.5, 0.25, 0.25))


def test_a_schedule_gives_its_rows_and_then_their_mean_or_the_last() -> None:
    rule, last = ScheduleWeights(table=TABLE), ScheduleWeights(table=TABLE, after_last="last")
    assert rule.init({}, 3) == {} and not rule.needs_each_reply
    replies = [cohort(np.zeros((3, 2)), round=t) for t in range(3)]
    got = [rule.weigh(one, {}, {})[0].tolist() for one in replies]
    assert got[:2] == [list(TABLE[0]), list(TABLE[1])]
    np.testing.assert_allclose(got[2], [0.3, 0.225, 0.475])
    assert last.weigh(replies[2], {}, {})[0].tolist() == list(TABLE[1])


def test_those_present_share_a_row_in_proportion() -> None:
    rule = ScheduleWeights(table=((0.1, 0.3, 0.2),))  # sums to 0.6: raw weights keep their total
    weights, _, _ = rule.weigh(cohort(np.zeros((2, 2)), ids=[0, 1]), {}, {})
    np.testing.assert_allclose(weights, [0.15, 0.45], rtol=1e-14)
    weights, _, _ = rule.weigh(cohort(np.zeros((3, 2)), ids=[2, 0, 1]), {}, {})
    assert weights.tolist() == [0.2, 0.1, 0.3]
    nobody = ScheduleWeights(table=((0.0, 0.0, 1.0),))
    weights, _, _ = nobody.weigh(cohort(np.zeros((2, 2)), ids=[0, 1], examples=[1, 3]), {}, {})
    np.testing.assert_allclose(weights, [0.25, 0.75])


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "schedule.safetensors"
    save_table(torch.tensor(TABLE, dtype=torch.float64), path)
    rule = ScheduleWeights(path=str(path))
    assert rule.table == TABLE
    path.unlink()
    assert ScheduleWeights(**{"table": rule.table, "path": rule.path}) == rule  # what a run's config holds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nowhere.safetensors"}, "there is no schedule at 'nowhere.safetensors': learn one"),
        ({"table": ((0.5, 0.5), (1.0,))}, r"rows of \[1, 2\] weights"),
        ({"table": ((float("nan"), 1.0),)}, "NaN"),
        ({"table": ((0.5, "x"),)}, r"must be a number"),
        ({"table": TABLE, "after_last": "first"}, "is not one of mean, last"),
    ],
)
def test_bad_schedules_are_refused(options: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        ScheduleWeights(**options)


def test_files_that_are_no_schedules_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "it.safetensors"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(Invalid, match="is not a safetensors file"):
        ScheduleWeights(path=str(path))
    save_table(torch.ones(3), path)
    with pytest.raises(Invalid, match=r"of shape \[rounds, clients\]"):
        ScheduleWeights(path=str(path))


def test_an_empty_or_unfitting_schedule_is_refused_before_training() -> None:
    with pytest.raises(Invalid, match="is empty: learn one"):
        ScheduleWeights().init({}, 3)
    with pytest.raises(Invalid, match="is for 3 clients, but there are 4"):
        ScheduleWeights(table=TABLE).init({}, 4)
