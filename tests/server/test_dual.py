"""FedSiam-DA's dual aggregation: hand-worked cases, an independent implementation, and how little it does."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.exchange import Cohort
from consilience.core.rounds import Diverged
from consilience.core.tree import Tree
from consilience.server import Averaging
from consilience.server.averaging.weighting.dual import DualWeights
from consilience.server.rules.dual_averaging import LayerwiseDual


def cohort(params: dict[str, Any], *, examples: list[float] | None = None, buffers: Tree | None = None) -> Cohort:
    """Clients 10, 11, ... with these stacked parameters."""
    stacked = {name: torch.as_tensor(value) for name, value in params.items()}
    m = len(next(iter(stacked.values())))
    counts = torch.tensor(examples or [1.0] * m, dtype=torch.float64)
    reply = {"model": {"params": stacked, "buffers": buffers or {}}}
    return Cohort(reply=reply, ids=np.arange(10, 10 + m), examples=counts, steps=np.ones(m, dtype=np.int64), round=0)


def weigh(part: DualWeights, replies: Cohort, start: dict[str, Any] | None = None) -> np.ndarray:
    params = {name: torch.as_tensor(value) for name, value in (start or {}).items()}
    weights, _, _ = part.weigh(replies, {"params": params, "buffers": {}}, {})
    assert weights.dtype == torch.float64
    return weights.numpy()


def by_hand(vectors: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Eqs (13) to (15) in extended precision, straight from the page."""
    w = vectors.astype(np.longdouble)
    f = (first[:, None].astype(np.longdouble) * w).sum(0)
    cosine = [(row / np.sqrt((row**2).sum()) * f / np.sqrt((f**2).sum())).sum() for row in w]
    return np.array(cosine / np.sum(cosine), dtype=np.longdouble)


def test_three_models_in_the_plane() -> None:
    """(1, 0), (0, 1), (1, 1): f = (2/3, 2/3), cosines 1/sqrt 2, 1/sqrt 2, 1; they sum to 1 + sqrt 2."""
    replies = cohort({"w": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]})
    root = np.sqrt(2)
    expected = np.array([1 / root, 1 / root, 1]) / (1 + root)
    np.testing.assert_allclose(weigh(DualWeights(), replies), expected, rtol=1e-15)
    state = Averaging(weighting=DualWeights()).init({"params": {"w": torch.zeros(2)}, "buffers": {}}, 3)
    after, notes = Averaging(weighting=DualWeights()).update(state, replies)
    middle = (1 / root + 1) / (1 + root)  # the sum of xi_k w_k, in both coordinates
    np.testing.assert_allclose(after["model"]["params"]["w"].numpy(), [middle, middle], rtol=1e-7)
    np.testing.assert_allclose(notes["cosine"].numpy(), [1 / root, 1 / root, 1], rtol=1e-15)


def test_a_model_that_points_away_gets_a_negative_weight() -> None:
    """(1, 0), (1, 0), (-1, 0): f = (1/3, 0), cosines 1, 1, -1, weights 1, 1, -1: no clipping."""
    replies = cohort({"w": [[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]})
    assert weigh(DualWeights(), replies).tolist() == [1, 1, -1]


def test_cosines_that_do_not_sum_to_more_than_zero_stop_the_run_and_name_the_clients() -> None:
    """A long model and two short ones against it: cosines 1, -1, -1."""
    with pytest.raises(Diverged, match=r"10: 1, 11: -1, 12: -1 sum to -1, not to more than 0"):
        weigh(DualWeights(), cohort({"w": [[9.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]]}))
    with pytest.raises(Diverged, match=r"10: 0, 11: 0 sum to 0"):  # they cancel: the mean has no direction
        weigh(DualWeights(), cohort({"w": [[1.0, 2.0], [-1.0, -2.0]]}))
    with pytest.raises(Diverged, match="of their updates"):
        weigh(DualWeights(compare_on="updates"), cohort({"w": [[2.0], [0.0]]}), {"w": [1.0]})


@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from(["uniform", "examples"]))
def test_it_equals_an_independent_implementation(seed: int, clients: int, first_stage: Any) -> None:
    """Several tensors make up one vector; start, noise and sizes at random; closer than the weights differ from 1/K."""
    draw = np.random.default_rng(seed)
    start = {"a": draw.normal(size=(3, 4)), "b": draw.normal(size=5)}
    stacked = {n: v + 0.05 * draw.normal(size=(clients, *v.shape)) for n, v in start.items()}
    examples = draw.integers(1, 50, clients).astype(float).tolist()
    replies = cohort(stacked, examples=examples)
    share = np.full(clients, 1 / clients) if first_stage == "uniform" else np.array(examples) / np.sum(examples)
    flat = np.hstack([v.reshape(clients, -1) for v in stacked.values()])
    moved = flat - np.hstack([v.reshape(-1) for v in start.values()])
    found = weigh(DualWeights(first_stage=first_stage), replies, start)
    np.testing.assert_allclose(found, by_hand(flat, share).astype(float), rtol=1e-13, atol=0)
    assert found.sum() == pytest.approx(1, abs=1e-14)
    expected = by_hand(moved, share).astype(float)
    if abs(expected).max() < 10:  # else the sum of cosines is close to zero
        np.testing.assert_allclose(
            weigh(DualWeights(compare_on="updates", first_stage=first_stage), replies, start), expected, rtol=1e-9
        )


@pytest.mark.parametrize(("noise", "most"), [(0.01, 2e-6), (0.05, 3e-5), (0.2, 8e-4), (0.5, 3e-3)])
def test_on_whole_weights_it_is_almost_the_plain_mean(noise: float, most: float) -> None:
    """Ten models apart by 1 % of their length have weights that differ from 1/10 in the seventh digit: it is seen."""
    draw = np.random.default_rng(0)
    start, steps = draw.normal(size=20_000), draw.normal(size=(10, 20_000))
    models = start + noise * steps
    replies = cohort({"w": models})
    found = weigh(DualWeights(), replies)
    np.testing.assert_allclose(found, by_hand(models, np.full(10, 0.1)).astype(float), rtol=1e-13)
    deviation = np.abs(found * 10 - 1).max()
    assert most / 10 < deviation < most
    # what the models share no longer hides what they learned
    assert np.abs(weigh(DualWeights(compare_on="updates"), replies, {"w": start}) * 10 - 1).max() > 0.01


def test_weights_of_single_precision_models_are_computed_in_double() -> None:
    draw = np.random.default_rng(1)
    models = (draw.normal(size=300) + 0.001 * draw.normal(size=(6, 300))).astype(np.float32)
    found = weigh(DualWeights(), cohort({"w": models}))
    np.testing.assert_allclose(found, by_hand(models, np.full(6, 1 / 6)).astype(float), rtol=1e-13)


@pytest.mark.parametrize("size", [1e-200, 1e-30, 1e30, 1e200])
def test_the_size_of_the_numbers_does_not_matter(size: float) -> None:
    """Squares of 1e200 overflow even double precision."""
    draw = np.random.default_rng(2)
    models = draw.normal(size=(4, 30)) + 1
    expected = weigh(DualWeights(), cohort({"w": models}))
    np.testing.assert_allclose(weigh(DualWeights(), cohort({"w": models * size})), expected, rtol=1e-12)


def test_an_update_of_no_length_counts_nothing_and_if_none_has_any_all_count_the_same() -> None:
    still = cohort({"w": [[1.0, 1.0], [2.0, 1.0], [2.0, 1.0]]})
    weights, _, notes = DualWeights(compare_on="updates").weigh(
        still, {"params": {"w": torch.ones(2)}, "buffers": {}}, {}
    )
    assert weights.tolist() == [0, 0.5, 0.5]
    assert int(notes["no_direction"]) == 1 and notes["cosine"].tolist() == [0, 1, 1]
    nobody = cohort({"w": [[1.0, 1.0]] * 4})
    assert weigh(DualWeights(compare_on="updates"), nobody, {"w": [1.0, 1.0]}).tolist() == [0.25] * 4
    assert weigh(DualWeights(), cohort({"w": torch.zeros(2, 3)})).tolist() == [0.5, 0.5]
    assert weigh(DualWeights(), cohort({"w": [[3.0, -4.0]]})).tolist() == [1]


def test_only_parameters_are_compared_and_buffers_have_the_same_weights() -> None:
    buffers = {"mean": torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64), "count": torch.tensor([3, 9, 5])}
    replies = cohort({"w": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]}, buffers=buffers)
    server = Averaging(weighting=DualWeights())
    start = {"params": {"w": torch.ones(2)}, "buffers": {"mean": torch.zeros(1), "count": torch.tensor(0)}}
    after, _ = server.update(server.init(start, 3), replies)
    root = np.sqrt(2)
    expected = (1 / root + 2 / root + 4) / (1 + root)
    assert float(after["model"]["buffers"]["mean"]) == pytest.approx(expected, rel=1e-14)
    assert int(after["model"]["buffers"]["count"]) == 9


# --- layer by layer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compare_on", ["weights", "updates"])
@pytest.mark.parametrize("first_stage", ["uniform", "examples"])
def test_every_layer_has_weights_of_its_own(compare_on: Any, first_stage: Any) -> None:
    """Weight and bias of a module are one vector; buffers have the weights of the whole."""
    draw = np.random.default_rng(3)
    start = {"one.weight": draw.normal(size=(2, 3)), "one.bias": draw.normal(size=2), "two.weight": draw.normal(size=4)}
    stacked = {n: v + 0.5 + 0.5 * draw.normal(size=(3, *v.shape)) for n, v in start.items()}
    statistic = draw.normal(size=(3, 2))
    replies = cohort(stacked, examples=[1.0, 5.0, 2.0], buffers={"mean": torch.tensor(statistic)})
    share = np.full(3, 1 / 3) if first_stage == "uniform" else np.array([1, 5, 2]) / 8
    model = {"params": {n: torch.tensor(v) for n, v in start.items()}, "buffers": {"mean": torch.zeros(2)}}
    server = LayerwiseDual(compare_on=compare_on, first_stage=first_stage)
    after, notes = server.update(server.init(model, 3), replies)

    def weights(*names: str) -> np.ndarray:
        flat = np.hstack([stacked[n].reshape(3, -1) for n in names])
        begun = np.hstack([start[n].reshape(-1) for n in names]) if compare_on == "updates" else 0
        return by_hand(flat - begun, share).astype(float)

    one, two, whole = weights("one.weight", "one.bias"), weights("two.weight"), weights(*start)
    for name, expected in (("one.weight", one), ("one.bias", one), ("two.weight", two)):
        merged = np.tensordot(expected, stacked[name], 1)
        np.testing.assert_allclose(after["model"]["params"][name].numpy(), merged, rtol=1e-12)
    np.testing.assert_allclose(after["model"]["buffers"]["mean"].numpy(), whole @ statistic, rtol=1e-12)
    np.testing.assert_allclose(notes["layer_weights"].numpy(), [one, two], rtol=1e-12)
    np.testing.assert_allclose(notes["weights"].numpy(), whole, rtol=1e-12)
    assert list(after["model"]["params"]) == list(start)


def test_a_layer_that_cannot_be_weighed_is_named() -> None:
    replies = cohort({"good.weight": [[9.0], [9.0]], "bad.weight": [[1.0], [-1.0]]})
    model = {"params": {"good.weight": torch.ones(1), "bad.weight": torch.ones(1)}, "buffers": {}}
    server = LayerwiseDual()
    with pytest.raises(Diverged, match="in layer 'bad'"):
        server.update(server.init(model, 2), replies)


def test_one_layer_is_the_whole_model_and_order_does_not_matter() -> None:
    draw = np.random.default_rng(4)
    models = torch.tensor(draw.normal(size=(5, 7)) + 1)
    start = {"params": {"only.weight": torch.ones(7, dtype=torch.float64)}, "buffers": {}}
    replies = cohort({"only.weight": models})
    whole, _ = (server := Averaging(weighting=DualWeights())).update(server.init(start, 5), replies)
    layered, _ = (by_layer := LayerwiseDual()).update(by_layer.init(start, 5), replies)
    turned = dataclasses.replace(cohort({"only.weight": models.flip(0)}), ids=np.arange(14, 9, -1))
    backwards, _ = by_layer.update(by_layer.init(start, 5), turned)
    for other in (layered, backwards):
        np.testing.assert_allclose(
            other["model"]["params"]["only.weight"], whole["model"]["params"]["only.weight"], rtol=1e-14
        )
