"""Weights for every tensor: SimAgg and FedAtt against loops in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.algorithms.fedatt import fedatt
from consilience.algorithms.simagg import simagg
from consilience.core.exchange import Cohort
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.selection import Everyone, SlidingWindow
from consilience.server import Averaging, ByExamples, SimProxWeights
from consilience.server.averaging.combining.attention import Attention
from consilience.server.averaging.combining.simagg import SimAgg
from consilience.server.averaging.steps.plain import Noisy
from consilience.server.protocols import Combine, CombineAround, Step


def random_models(seed: int, m: int, scale: float = 1.0) -> tuple[Tree, Tree]:
    """(stacked models of several shapes, the model they started from)."""
    draw = np.random.default_rng(seed)
    shapes = {"weight": (3, 2), "bias": (3,), "gain": ()}
    centre = {name: draw.normal(size=shape) for name, shape in shapes.items()}
    stacked = {name: c + scale * draw.normal(size=(m, *c.shape)) for name, c in centre.items()}
    buffers = {"mean": torch.from_numpy(draw.normal(size=(m, 3))), "n": torch.from_numpy(draw.integers(0, 99, m))}
    first = {"mean": torch.zeros(3, dtype=torch.float64), "n": torch.tensor(0)}
    params = {name: torch.from_numpy(np.asarray(value)) for name, value in stacked.items()}
    return (
        {"params": params, "buffers": buffers},
        {"params": {name: torch.from_numpy(np.asarray(value)) for name, value in centre.items()}, "buffers": first},
    )


def shares_by_loop(p: np.ndarray, v: np.ndarray, eps: float) -> np.ndarray:
    """S0-11 for one tensor."""
    m = len(p)
    mean = sum(p) / m
    u = [1 / (float(np.abs(p[k] - mean).sum()) + eps) for k in range(m)]
    u = [value / sum(u) for value in u]
    return np.array([(u[k] + v[k]) / (sum(u) + sum(v)) for k in range(m)])


@given(st.integers(0, 2**31), st.integers(1, 6), st.sampled_from([1e-5, 0.1]), st.sampled_from([1e-6, 1.0, 100.0]))
def test_simagg_is_the_reading(seed: int, m: int, eps: float, scale: float) -> None:
    models, _ = random_models(seed, m, scale)
    v = np.random.default_rng(seed).dirichlet(np.ones(m))
    merged = SimAgg(eps=eps).merge(models, torch.from_numpy(v))
    for name, value in models["params"].items():
        share = shares_by_loop(value.numpy(), v, eps)
        np.testing.assert_allclose(merged["params"][name], np.tensordot(share, value.numpy(), 1), rtol=0, atol=1e-11)
    share = shares_by_loop(models["buffers"]["mean"].numpy(), v, eps)
    np.testing.assert_allclose(merged["buffers"]["mean"], share @ models["buffers"]["mean"].numpy(), atol=1e-12)
    assert int(merged["buffers"]["n"]) == int(models["buffers"]["n"].max())


def test_simagg_by_hand() -> None:
    """Values 0, 0, 3: mean 1, distances 1, 1, 2, so u = 2/5, 2/5, 1/5; N = 1, 1, 2, so v = 1/4, 1/4, 1/2."""
    stacked, v = torch.tensor([[0.0], [0.0], [3.0]], dtype=torch.float64), torch.tensor([0.25, 0.25, 0.5])
    got = SimAgg(eps=1e-12).shares(stacked, v)
    assert got.tolist() == pytest.approx([0.325, 0.325, 0.35], abs=1e-10)
    merged = SimAgg(eps=1e-12).merge({"w": stacked}, v.double())
    assert merged["w"].item() == pytest.approx(1.05, abs=1e-10)


def test_simagg_weighs_each_tensor_by_itself() -> None:
    """Client 0 is far off in one tensor, client 2 in the other."""
    models = {"a": torch.tensor([[9.0], [0.0], [0.1]]), "b": torch.tensor([[0.0], [0.1], [9.0]])}
    v = torch.full((3,), 1 / 3, dtype=torch.float64)
    a, b = (SimAgg().shares(models[name], v) for name in "ab")
    assert a.argmin() == 0 and b.argmin() == 2


def test_simagg_is_not_blind_to_tensors_of_equal_sum() -> None:
    """The authors' |sum p_k - sum mean| cannot tell (5, -5) from (0, 0)."""
    got = SimAgg().shares(torch.tensor([[5.0, -5.0], [0.0, 0.0], [0.1, 0.0]]), torch.ones(3) / 3)
    assert got[0] < got[1]


@pytest.mark.parametrize("combine", [SimAgg(), Attention()], ids=str)
def test_rows_19_21_22_and_28(combine: Any) -> None:
    """Equal replies give that reply; huge and half-precision entries stay finite; one client gives its model."""
    models, centre = random_models(0, 1)
    weights = torch.ones(1, dtype=torch.float64)
    for name, value in around(combine, models, weights, centre)["params"].items():
        torch.testing.assert_close(value, models["params"][name][0], rtol=1e-14, atol=0)
    same = {part: {n: v.repeat(4, *(1,) * (v.dim() - 1)) for n, v in tree.items()} for part, tree in models.items()}
    merged = around(combine, same, torch.full((4,), 0.25, dtype=torch.float64), centre)
    for name, value in merged["params"].items():
        torch.testing.assert_close(value, models["params"][name][0], rtol=1e-14, atol=0)
    for dtype, size in ((torch.float32, 1e30), (torch.float64, 1e300), (torch.float16, 60_000.0)):
        big = {"params": {"w": torch.tensor([[size], [size], [-size]], dtype=dtype)}, "buffers": {}}
        still = {"params": {"w": torch.zeros(1, dtype=dtype)}, "buffers": {}}
        got = around(combine, big, torch.full((3,), 1 / 3, dtype=torch.float64), still)["params"]["w"]
        assert bool(got.isfinite().all()) and got.dtype == dtype


def around(combine: Any, models: Tree, weights: torch.Tensor, centre: Tree) -> Tree:
    """One merge, as the averaging server does it."""
    if isinstance(combine, CombineAround):
        return combine.merge_around(models, weights, centre)
    return combine.merge(models, weights)


def attention_by_loop(value: np.ndarray, centre: np.ndarray, p: float) -> np.ndarray:
    """Eq (3) for one layer."""
    distance = [sum(abs(x) ** p for x in np.ravel(centre - one)) ** (1 / p) for one in value]
    e = [math.exp(d) for d in distance]
    return np.array([x / sum(e) for x in e])


@given(st.integers(0, 2**31), st.integers(1, 6), st.sampled_from([1.0, 2.0, 3.5]), st.sampled_from([0.3, 1.0, 1.4]))
def test_fedatt_is_the_reading(seed: int, m: int, p: float, epsilon: float) -> None:
    models, centre = random_models(seed, m)
    merged = Attention(epsilon=epsilon, p=p).merge_around(models, torch.ones(m), centre)
    every = []
    for name, value in models["params"].items():
        before, replies = centre["params"][name].numpy(), value.numpy()
        att = attention_by_loop(replies, before, p)
        every.append(att)
        expected = before - epsilon * sum(att[k] * (before - replies[k]) for k in range(m))
        np.testing.assert_allclose(merged["params"][name], expected, rtol=0, atol=1e-12)
    means = np.mean(every, 0) @ models["buffers"]["mean"].numpy()  # each client's mean attention, no step size
    np.testing.assert_allclose(merged["buffers"]["mean"], means, rtol=0, atol=1e-12)
    assert int(merged["buffers"]["n"]) == int(models["buffers"]["n"].max())


def test_fedatt_by_hand_far_clients_count_more() -> None:
    """Distances 0 and log 3 from 0: attention 1/4 and 3/4, as printed; per layer."""
    models = {"params": {"w": torch.tensor([[0.0], [math.log(3)]]), "b": torch.tensor([2.0, 2.0])}, "buffers": {}}
    centre = {"params": {"w": torch.zeros(1), "b": torch.tensor(0.0)}, "buffers": {}}
    layers = Attention().layers(models, centre)
    assert layers["w"].tolist() == pytest.approx([0.25, 0.75], abs=1e-7) and layers["b"].tolist() == [0.5, 0.5]
    merged = Attention(epsilon=0.5).merge_around(models, torch.ones(2), centre)["params"]
    assert merged["w"].item() == pytest.approx(0.375 * math.log(3), rel=1e-6) and merged["b"].item() == 1.0


def test_fedatt_takes_the_entry_wise_norm_of_matrices() -> None:
    """The identity has spectral norm 1 and entry-wise norm sqrt(2)."""
    models = {"params": {"w": torch.stack([torch.eye(2), torch.zeros(2, 2)])}, "buffers": {}}
    (got,) = Attention().layers(models, {"params": {"w": torch.zeros(2, 2)}, "buffers": {}}).values()
    assert math.log(got[0] / got[1]) == pytest.approx(2**0.5, rel=1e-12)


def test_row_20_distances_of_thousands_do_not_overflow() -> None:
    models = {"params": {"w": torch.tensor([[5000.0], [5001.0], [0.0]])}, "buffers": {}}
    (got,) = Attention().layers(models, {"params": {"w": torch.zeros(1)}, "buffers": {}}).values()
    assert got.tolist() == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e), 0.0], abs=1e-12)


def test_without_a_broadcast_model_attention_looks_from_the_mean() -> None:
    models, _ = random_models(3, 3)
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    mean = {part: {n: v.double().mean(0) for n, v in tree.items()} for part, tree in models.items()}
    got, expected = Attention().merge(models, weights), Attention().merge_around(models, weights, mean)
    assert tiny.gap(got["params"], expected["params"]) <= 1e-12


def test_noise_is_gaussian_and_a_function_of_seed_and_move() -> None:
    params, merged = {"w": torch.zeros(20_000)}, {"w": torch.ones(20_000)}
    step = Noisy(deviation=0.3, seed=4)
    first, state = step.move(params, merged, step.init(params))
    again, _ = step.move(params, merged, step.init(params))
    second, _ = step.move(params, merged, state)
    other, _ = Noisy(deviation=0.3, seed=5).move(params, merged, step.init(params))
    assert torch.equal(first["w"], again["w"]) and not torch.equal(first["w"], second["w"])
    assert not torch.equal(first["w"], other["w"]) and first["w"].dtype == torch.float32
    assert float(first["w"].mean()) == pytest.approx(1, abs=0.01) and float(first["w"].std()) == pytest.approx(
        0.3, rel=0.03
    )
    assert int(state["moves"]) == 1 and isinstance(step, Step)
    quiet, _ = Noisy().move(params, merged, Noisy().init(params))
    assert torch.equal(quiet["w"], merged["w"])


@pytest.mark.usefixtures("untraced")
def test_recipes_are_these_parts() -> None:
    assert fedatt().server == Averaging(combine=Attention()) and simagg().server == Averaging(combine=SimAgg())
    assert simagg().selection == SlidingWindow(fraction=0.2)
    noisy = fedatt(noise=0.01, noise_seed=3, epsilon=1.2, p=1.0, batch_size=4)
    assert noisy.server.step == Noisy(deviation=0.01, seed=3)  # type: ignore[attr-defined]
    runs = [[one.model for one in run(noisy, tiny.engine(lane=lane), rounds=2)] for lane in ("serial", "batched")]
    assert tiny.gap(runs[0][-1], runs[1][-1]) <= 1e-12
    *_, one = run(simagg(batch_size=4, selection=Everyone()), tiny.engine(), rounds=1)
    expected, _ = Averaging(combine=SimAgg()).update(
        Averaging().init(tiny.engine().start(), 5), Cohort(**{**vars(one.cohort), "heard": None})
    )
    assert tiny.gap(one.model, expected["model"]) <= 1e-12


def test_parts_fit_the_protocols_and_refuse_what_cannot_meet() -> None:
    for part in (SimAgg(), Attention()):
        assert isinstance(part, Combine) and part.needs_each_reply
    assert Averaging(weighting=SimProxWeights(), combine=SimAgg()).needs_each_reply  # v may be any weights
    with pytest.raises(Invalid, match="would have no effect"):
        Averaging(weighting=SimProxWeights(), combine=Attention())
    Averaging(weighting=ByExamples(), combine=Attention())
    for wrong in ({"p": 0.5}, {"epsilon": 0}):
        with pytest.raises(Invalid, match="out of range"):
            Attention(**wrong)
