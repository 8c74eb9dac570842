"""SimProx's weights against a literal second implementation of the paper's equations (7) to (14)."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.exchange import Cohort
from consilience.core.settings import Invalid
from consilience.server import SimProxWeights

getcontext().prec = 60


def literal(w: np.ndarray, w_global: np.ndarray, *, lambda_0: float, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """(alpha of eq 13, softmax of eq 14), loop by loop as printed; exp(-g) in 60 decimal digits."""
    m = len(w)
    norm = np.linalg.norm
    pairs = [(i, j) for i in range(m) for j in range(i + 1, m)]
    sigma = sum(norm(w[i] - w[j]) for i, j in pairs) / math.comb(m, 2)  # (7)
    similarity = np.zeros((m, m))
    s = [w[i] @ w_global / (norm(w[i]) * norm(w_global)) for i in range(m)]
    s_bar = sum(s) / m
    lam = lambda_0 * (s_bar / tau) if s_bar < tau else lambda_0
    lam = max(lam, 0.0)  # lambda is in [0, 1]
    for i in range(m):
        for j in range(m):
            gaussian = math.exp(-(norm(w[i] - w[j]) ** 2) / (2 * sigma**2)) if sigma > 0 else 1.0  # (8)
            cosine = w[i] @ w[j] / (norm(w[i]) * norm(w[j]))  # (9)
            similarity[i, j] = lam * cosine + (1 - lam) * gaussian  # (10)
    g = [norm(w[i] - w_global) for i in range(m)]  # (11), previous = the model broadcast this round
    alpha = [
        (-Decimal(float(g[i]))).exp() * Decimal(1 + sum(similarity[i, j] for j in range(m) if j != i) / (m - 1))
        for i in range(m)
    ]  # (12)
    alpha = [a / sum(alpha) for a in alpha]  # (13)
    soft = [a.exp() / sum(b.exp() for b in alpha) for a in alpha]  # (14)
    return np.array([float(a) for a in alpha]), np.array([float(a) for a in soft])


def weigh(
    w: np.ndarray,
    w_global: np.ndarray,
    *,
    examples: Any = None,
    buffers: Any = None,
    dtype: Any = torch.float64,
    **options: Any,
) -> np.ndarray:
    """The library's weights; parameters are cut into two tensors."""
    m = len(w)
    stacked = torch.from_numpy(np.asarray(w)).to(dtype)
    anchor = torch.from_numpy(np.asarray(w_global)).to(dtype)
    cohort = Cohort(
        reply={
            "model": {
                "params": {"a": stacked[:, :1], "b": stacked[:, 1:]},
                "buffers": {} if buffers is None else {"n": buffers},
            }
        },
        ids=np.arange(m),
        examples=torch.ones(m, dtype=torch.float64)
        if examples is None
        else torch.tensor(examples, dtype=torch.float64),
        steps=np.ones(m, dtype=np.int64),
        round=0,
    )
    model = {"params": {"a": anchor[:1], "b": anchor[1:]}, "buffers": {}}
    weights, state, _ = SimProxWeights(**options).weigh(cohort, model, {})
    assert state == {} and weights.dtype == torch.float64 and weights.shape == (m,)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    return weights.numpy()


def clients(seed: int, m: int, size: int, moves: Any, *, offset: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """A global model and clients that moved the given lengths in random directions."""
    draw = np.random.default_rng(seed)
    w_global = offset * draw.normal(size=size)
    directions = draw.normal(size=(m, size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return w_global + np.broadcast_to(moves, m)[:, None] * directions, w_global


@given(
    st.integers(0, 2**31),
    st.integers(2, 9),
    st.integers(2, 50),
    st.floats(1e-6, 300),
    st.floats(0.01, 50),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_weights_are_the_papers(
    seed: int, m: int, size: int, move: float, offset: float, lambda_0: float, tau: float
) -> None:
    spread = np.random.default_rng(seed + 1).uniform(0.3, 1.7, m)
    w, w_global = clients(seed, m, size, move * spread, offset=offset)
    alpha, soft = literal(w, w_global, lambda_0=lambda_0, tau=tau)
    np.testing.assert_allclose(weigh(w, w_global, lambda_0=lambda_0, tau=tau), soft, rtol=0, atol=1e-12)
    got = weigh(w, w_global, lambda_0=lambda_0, tau=tau, softmax=False)
    np.testing.assert_allclose(got, alpha, rtol=0, atol=1e-12 * max(1, move))


def test_defaults_are_those_of_the_readings() -> None:
    assert SimProxWeights() == SimProxWeights(lambda_0=0.7, tau=0.5, softmax=True)
    assert SimProxWeights().needs_each_reply
    assert SimProxWeights().init({}, 3) == {}


@pytest.mark.parametrize("opposed", [0.2, 0.6, 0.95])
def test_clients_that_oppose_the_global_model_get_lambda_zero(opposed: float) -> None:
    """s_bar < 0: eq (10) is all Gaussian, not a negative share."""
    draw = np.random.default_rng(0)
    w_global = draw.normal(size=30)
    w = -opposed * w_global + 0.01 * draw.normal(size=(4, 30))
    expected = literal(w, w_global, lambda_0=0.7, tau=0.5)[1]
    np.testing.assert_allclose(weigh(w, w_global), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(weigh(w, w_global), weigh(w, w_global, lambda_0=0.0), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("m", "low", "high"), [(6, 0.1296, 0.3522), (10, 0.0853, 0.2320), (20, 0.0460, 0.1252)])
def test_no_weight_exceeds_another_by_more_than_e(m: int, low: float, high: float) -> None:
    assert low == pytest.approx(1 / (math.e + m - 1), abs=1e-4) and high == pytest.approx(math.e * low, abs=1e-3)
    for seed in range(20):
        for move in (0.01, 1, 10, 1000):
            w, w_global = clients(seed, m, 20, np.random.default_rng(seed).uniform(0, move, m))
            got = weigh(w, w_global)
            assert got.max() / got.min() <= math.e * (1 + 1e-12)
            assert low - 1e-4 <= got.min() and got.max() <= high + 1e-4


@pytest.mark.parametrize(
    ("mean", "spread", "alpha", "final"),
    [
        (0.1, 0.5, (0.178, 0.155), (0.1685, 0.1648)),
        (1, 0.3, (0.222, 0.119), (0.176, 0.159)),
        (5, 0.3, (0.466, 0.023), (0.222, 0.143)),
        (20, 0.3, (0.911, 0.000), (0.328, 0.132)),
        (100, 0.3, (1.000, 0.000), (0.352, 0.130)),
    ],
)
def test_the_table_of_reading_s0_3(mean: float, spread: float, alpha: Any, final: Any) -> None:
    """m = 6 clients in random directions: first and last weight as seen by an independent implementation."""
    moves = np.linspace(mean * (1 - spread), mean * (1 + spread), 6)
    w, w_global = clients(0, 6, 2000, moves, offset=3.0)
    without, with_softmax = weigh(w, w_global, softmax=False), weigh(w, w_global)
    assert np.all(np.diff(without) <= 0) and np.all(np.diff(with_softmax) <= 0)
    assert (without[0], without[-1]) == pytest.approx(alpha, abs=0.006)
    assert (with_softmax[0], with_softmax[-1]) == pytest.approx(final, abs=0.002)
    assert np.ptp(with_softmax) > 1e-3  # more than rounding away from uniform


@pytest.mark.parametrize("m", [2, 3, 6, 7, 20])
@pytest.mark.parametrize("moved", [0.0, 0.3, 1e4])
def test_identical_clients_weigh_exactly_the_same(m: int, moved: float) -> None:
    w, w_global = clients(1, 1, 1003, moved)
    got = weigh(np.repeat(w, m, axis=0), w_global)
    assert (got == got[0]).all()
    assert got[0] == 1 / m


def test_one_client_weighs_one() -> None:
    w, w_global = clients(1, 1, 40, 3.0)
    assert weigh(w, w_global).tolist() == [1.0]
    assert weigh(np.zeros((1, 40)), w_global).tolist() == [1.0]  # nothing to compare, so nothing is undefined


@pytest.mark.parametrize("g", [104, 746, 1000, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_survive_underflow_of_exp(g: float, dtype: torch.dtype) -> None:
    """exp(-g) is exactly 0 from 104 (float32) and 746 (float64) on: literally 0/0."""
    w, w_global = clients(2, 6, 400, g + np.arange(6) * 0.2)
    w, w_global = (torch.from_numpy(v).to(dtype).double().numpy() for v in (w, w_global))
    alpha, soft = literal(w, w_global, lambda_0=0.7, tau=0.5)
    got = weigh(w, w_global, dtype=dtype)
    assert np.isfinite(got).all() and abs(got.sum() - 1) <= 1e-12
    np.testing.assert_allclose(got, soft, rtol=0, atol=1e-9)
    np.testing.assert_allclose(weigh(w, w_global, dtype=dtype, softmax=False), alpha, rtol=0, atol=1e-9)


def test_huge_entries_in_float32() -> None:
    """Norms of 1e30 entries overflow in float32; here only the weights' exponent is extreme."""
    w, w_global = clients(3, 4, 10, 0.3)
    got = weigh(1e30 * w, 1e30 * w_global, dtype=torch.float32)
    assert np.isfinite(got).all()
    nearest = np.argmin(np.linalg.norm(w - w_global, axis=1).astype(np.float32))
    assert got.max() <= math.e / (math.e + 3) + 1e-12 and 0 <= nearest < 4


@given(st.integers(0, 2**31), st.permutations(range(6)))
def test_permuting_clients_permutes_weights(seed: int, order: list[int]) -> None:
    w, w_global = clients(seed, 6, 15, np.random.default_rng(seed).uniform(0.1, 3, 6))
    np.testing.assert_allclose(weigh(w[order], w_global), weigh(w, w_global)[order], rtol=0, atol=1e-12)


def test_permuting_clients_with_close_twins_permutes_weights() -> None:
    w, w_global = clients(5, 3, 500, 1.0)
    w = np.concatenate([w, w[2:] + 1e-9, w[2:] - 1e-9])
    got = weigh(w, w_global, lambda_0=0.0)
    for order in ([4, 3, 2, 1, 0], [2, 0, 3, 1, 4]):
        np.testing.assert_allclose(weigh(w[order], w_global, lambda_0=0.0), got[order], rtol=0, atol=1e-12)


def test_a_diverging_client_leaves_the_others_comparable() -> None:
    w, w_global = clients(5, 4, 50, 0.1)
    w[0] *= 1e12
    expected = literal(w, w_global, lambda_0=0.7, tau=0.5)[1]
    np.testing.assert_allclose(weigh(w, w_global), expected, rtol=0, atol=1e-9)


def test_example_counts_and_buffers_play_no_part() -> None:
    w, w_global = clients(0, 3, 9, [0.1, 0.5, 1.0])
    plain = weigh(w, w_global)
    assert (weigh(w, w_global, examples=[1, 1000, 5]) == plain).all()
    assert (weigh(w, w_global, buffers=torch.tensor([5, 10**6, 3])) == plain).all()


def test_zero_vectors_are_refused() -> None:
    w, w_global = clients(0, 3, 9, 0.5)
    with pytest.raises(Invalid, match="the global model is all zeros"):
        weigh(w, 0 * w_global)
    w[1] = 0
    with pytest.raises(Invalid, match=r"the model of clients \[1\] is all zeros"):
        weigh(w, w_global)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lambda_0": 1.5}, r"SimProxWeights.lambda_0 = 1.5 is out of range: it must be >= 0 and <= 1"),
        ({"tau": 0}, "SimProxWeights.tau = 0.0 is out of range: it must be > 0"),
        ({"softmax": "yes"}, "SimProxWeights.softmax = 'yes' must be true or false"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        SimProxWeights(**options)


def test_a_client_nearer_to_the_others_weighs_more() -> None:
    """Equal moves: only similarity decides."""
    w_global = np.zeros(5)
    w_global[4] = 10.0
    w = np.stack(
        [
            w_global + np.eye(5)[0],
            w_global + np.eye(5)[0] * np.cos(0.1) + np.eye(5)[1] * np.sin(0.1),
            w_global - np.eye(5)[0],
        ]
    )
    got = weigh(w, w_global)
    assert got[0] > got[2] and got[1] > got[2]
