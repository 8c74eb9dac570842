"""Robust combining rules against plain NumPy, against the `byzfl` package where it is installed, and by hand."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.core.exchange import Cohort
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.server import Averaging, SimProxWeights, UniformWeights
from consilience.server.averaging.combining.centred_clipping import CentredClipping
from consilience.server.averaging.combining.coordinate_wise import Median, TrimmedMean
from consilience.server.averaging.combining.geometric_median import GeometricMedian
from consilience.server.averaging.combining.krum import Bulyan, Krum, MultiKrum, Neighbours, scores
from consilience.server.averaging.combining.nearest_neighbour_mixing import NearestNeighbourMixing
from consilience.server.averaging.combining.tolerance import faulty
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.protocols import Combine, uses_weights

RULES: tuple[Combine, ...] = (
    Median(),
    TrimmedMean(f=1),
    GeometricMedian(),
    Krum(f=1),
    MultiKrum(f=1),
    Bulyan(f=1),
    CentredClipping(),
    CentredClipping(tau=1.0, iterations=3),
    NearestNeighbourMixing(f=1, then=TrimmedMean(f=1)),
    NearestNeighbourMixing(f=3, then=CentredClipping()),
)
each_rule = pytest.mark.parametrize("rule", RULES, ids=str)


def models_of(vectors: np.ndarray, dtype: torch.dtype = torch.float64) -> Tree:
    """Rows as models of two tensors, one of them a matrix where the length allows."""
    whole = torch.from_numpy(np.ascontiguousarray(vectors)).to(dtype)
    cut = whole.shape[1] // 2
    return {"params": {"a": whole[:, :cut], "b": whole[:, cut:, None]}, "buffers": {}}


def vector(model: Tree) -> np.ndarray:
    return np.concatenate([leaf.double().numpy().ravel() for leaf in model["params"].values()])


def uniform(count: int) -> torch.Tensor:
    return torch.full((count,), 1 / count, dtype=torch.float64)


def merged(rule: Combine, vectors: np.ndarray, weights: torch.Tensor | None = None) -> np.ndarray:
    return vector(rule.merge(models_of(vectors), uniform(len(vectors)) if weights is None else weights))


# --- what the papers say, once more in NumPy -------------------------------------------------------------------------


def pairs(vectors: np.ndarray) -> np.ndarray:
    return np.array([[np.sqrt(((a - b) ** 2).sum()) for b in vectors] for a in vectors])


def krum_scores(vectors: np.ndarray, near: int) -> list[float]:
    apart = pairs(vectors) ** 2
    return [float(np.mean(sorted(np.delete(row, i))[:near])) for i, row in enumerate(apart)]


def numpy_krum(vectors: np.ndarray, f: int, spare: int = 1) -> np.ndarray:
    return vectors[int(np.argmin(krum_scores(vectors, len(vectors) - f - spare)))]


def numpy_multi_krum(vectors: np.ndarray, f: int) -> np.ndarray:
    best = np.argsort(krum_scores(vectors, len(vectors) - f - 1), kind="stable")[: len(vectors) - f]
    return vectors[best].mean(0)


def numpy_mixing(vectors: np.ndarray, f: int) -> np.ndarray:
    order = np.argsort(pairs(vectors), axis=1, kind="stable")[:, : len(vectors) - f]
    return np.stack([vectors[row].mean(0) for row in order])


def numpy_trimmed(vectors: np.ndarray, f: int) -> np.ndarray:
    return np.stack([np.mean(sorted(column)[f : len(vectors) - f]) for column in vectors.T])


def numpy_bulyan(vectors: np.ndarray, f: int) -> np.ndarray:
    left, chosen = list(vectors), []
    while len(chosen) < len(vectors) - 2 * f:
        near, all_left = max(1, len(left) - f - 1), np.stack(left)
        found = krum_scores(all_left, near) if len(left) > 1 else [0.0]
        total = pairs(all_left).sum(1)  # two mutually nearest models tie when one neighbour counts
        chosen.append(left.pop(min(range(len(left)), key=lambda i: (found[i], total[i]))))
    picked, out = np.stack(chosen), []
    for column in picked.T:
        middle = np.median(column)
        nearest = sorted(sorted(column), key=lambda value: abs(value - middle))[: len(vectors) - 4 * f]
        out.append(np.mean(nearest))
    return np.array(out)


def numpy_clipping(vectors: np.ndarray, tau: float, rounds: int, centre: np.ndarray) -> np.ndarray:
    for _ in range(rounds):
        apart = vectors - centre
        norms = np.maximum(np.linalg.norm(apart, axis=1), 1e-300)
        centre = centre + (apart * np.minimum(1, tau / norms)[:, None]).mean(0)
    return centre


@st.composite
def replies(draw: st.DrawFn, times: int, plus: int) -> tuple[np.ndarray, int]:
    """(vectors, f) with n >= times f + plus; sometimes with copies, sometimes with far outliers."""
    f = draw(st.integers(0, 3))
    n = draw(st.integers(max(2, times * f + plus), times * f + plus + 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    vectors = rng.normal(size=(n, draw(st.integers(2, 9))))
    if draw(st.booleans()):
        vectors[: n // 2] = vectors[0]  # ties
    if draw(st.booleans()):
        vectors[-1] *= 10.0 ** draw(st.integers(1, 12))
    return vectors, f


def close(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12 * max(1.0, float(np.abs(expected).max())))


@settings(max_examples=40, deadline=None)
@given(replies(2, 1))
def test_coordinate_rules_equal_numpy(case: tuple[np.ndarray, int]) -> None:
    vectors, f = case
    close(merged(Median(), vectors), np.median(vectors, axis=0))
    close(merged(TrimmedMean(f=f), vectors), numpy_trimmed(vectors, f))


@settings(max_examples=40, deadline=None)
@given(replies(2, 3))
def test_krum_and_mixing_equal_numpy(case: tuple[np.ndarray, int]) -> None:
    vectors, f = case
    close(merged(Krum(f=f), vectors), numpy_krum(vectors, f))
    close(merged(Krum(f=f, neighbours="n-f-2"), vectors), numpy_krum(vectors, f, spare=2))
    close(merged(MultiKrum(f=f), vectors), numpy_multi_krum(vectors, f))
    mixed = numpy_mixing(vectors, f)
    close(merged(NearestNeighbourMixing(f=f, then=TrimmedMean(f=f)), vectors), numpy_trimmed(mixed, f))


@settings(max_examples=40, deadline=None)
@given(replies(4, 3))
def test_bulyan_equals_numpy(case: tuple[np.ndarray, int]) -> None:
    vectors, f = case
    close(merged(Bulyan(f=f), vectors), numpy_bulyan(vectors, f))


def chosen_anew(distance: np.ndarray, f: int, neighbours: Neighbours) -> np.ndarray:
    """Krum, again and again, on the distances of those left."""
    left, chosen = np.arange(len(distance)), []
    for _ in range(len(distance) - 2 * f):
        apart = distance[np.ix_(left, left)]
        first = np.lexsort((apart.sum(1), scores(apart, f, neighbours)))[0]
        chosen.append(left[first])
        left = np.delete(left, first)
    return np.sort(chosen)


@pytest.mark.parametrize("neighbours", ["n-f-1", "n-f-2"])
@pytest.mark.parametrize("kind", ["normal", "copies", "lattice", "corners", "overflowing", "unusable"])
def test_bulyan_chooses_as_krum_again_and_again(kind: str, neighbours: Neighbours) -> None:
    """To the bit, so that rounding decides alike where distances are equal."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        f = int(rng.integers(0, 5))
        n = 4 * f + 3 + int(rng.integers(0, 12))
        vectors = rng.normal(size=(n, 5))
        if kind == "copies":
            vectors[: n // 2] = vectors[0]
        if kind in ("lattice", "corners"):
            vectors = rng.integers(0, 3 if kind == "lattice" else 2, size=(n, 4)).astype(float)
        distance = np.linalg.norm(vectors[:, None] - vectors, axis=2) * (1e200 if kind == "overflowing" else 1)
        if kind == "unusable":
            distance[1], distance[:, 1] = np.inf, np.inf
        got = Bulyan(f=f, neighbours=neighbours)._chosen(distance, f)
        assert got.tolist() == chosen_anew(distance, f, neighbours).tolist()


@settings(max_examples=40, deadline=None)
@given(replies(2, 1), st.floats(0.01, 5), st.integers(1, 4))
def test_centred_clipping_equals_numpy(case: tuple[np.ndarray, int], tau: float, rounds: int) -> None:
    vectors, _ = case
    rule, centre = CentredClipping(tau=tau, iterations=rounds), np.linspace(-1, 1, vectors.shape[1])
    around = {"params": {k: v[0] for k, v in models_of(centre[None])["params"].items()}, "buffers": {}}
    got = vector(rule.merge_around(models_of(vectors), uniform(len(vectors)), around))
    np.testing.assert_allclose(got, numpy_clipping(vectors, tau, rounds, centre), rtol=0, atol=1e-9)
    close(merged(rule, vectors), numpy_clipping(vectors, tau, rounds, np.median(vectors, axis=0)))


@settings(max_examples=40, deadline=None)
@given(replies(2, 1), st.integers(0, 2**31))
def test_geometric_median_has_the_least_sum_of_distances(case: tuple[np.ndarray, int], seed: int) -> None:
    vectors, _ = case
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(len(vectors)))
    got = merged(GeometricMedian(), vectors, torch.from_numpy(weights))

    def cost(v: np.ndarray) -> float:
        return float(weights @ np.linalg.norm(vectors - v, axis=1))

    scale = max(1.0, float(np.median(np.abs(vectors))))
    for candidate in (*vectors, vectors.mean(0), *(got + 1e-3 * scale * rng.normal(size=(20, vectors.shape[1])))):
        assert cost(got) <= cost(candidate) * (1 + 1e-12) + 2e-6  # nu allows 1e-6


# --- against byzfl ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byzfl() -> Any:
    """Its aggregators alone: the package's own __init__ needs torchvision, plots and tables, which are not for us."""
    found = importlib.util.find_spec("byzfl")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("byzfl is not installed (pip install --no-deps byzfl)")
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "byzfl"}
    hollow = types.ModuleType("byzfl")
    hollow.__path__ = list(found.submodule_search_locations)
    sys.modules["byzfl"] = hollow
    yield importlib.import_module("byzfl.aggregators")
    for name in [name for name in sys.modules if name.split(".")[0] == "byzfl"]:
        del sys.modules[name]
    sys.modules.update(before)


def test_rules_equal_byzfl(byzfl: Any) -> None:
    rng = np.random.default_rng(0)
    for n, f, d, ties in itertools.product(range(3, 15), range(5), (2, 5, 40), ("none", "copies", "lattice")):
        if n < 2 * f + 3:
            continue
        vectors = rng.normal(size=(n, d))
        if ties == "copies":
            vectors[rng.permutation(n)[: n // 2]] = vectors[0]
        if ties == "lattice":  # models that differ, at distances that are exactly equal
            vectors = rng.integers(0, 3, size=(n, d)).astype(float)
        close(merged(Median(), vectors), byzfl.Median()(vectors))
        close(merged(TrimmedMean(f=f), vectors), byzfl.TrMean(f=f)(vectors))
        close(merged(Krum(f=f), vectors), byzfl.Krum(f=f)(vectors))
        close(merged(MultiKrum(f=f), vectors), byzfl.MultiKrum(f=f)(vectors))
        mixed = byzfl.NNM(f=f)(vectors)
        for ours, theirs in ((TrimmedMean(f=f), byzfl.TrMean(f=f)), (Median(), byzfl.Median())):
            close(merged(NearestNeighbourMixing(f=f, then=ours), vectors), theirs(mixed))
        clipped = byzfl.CenteredClipping(tau=0.7, L=3)(vectors)
        zero = {"params": {k: torch.zeros_like(v[0]) for k, v in models_of(vectors)["params"].items()}, "buffers": {}}
        rule = CentredClipping(tau=0.7, iterations=3)
        close(vector(rule.merge_around(models_of(vectors), uniform(n), zero)), clipped)
        ours = merged(GeometricMedian(nu=0.1, tolerance=0.0, iterations=400), vectors)
        np.testing.assert_allclose(ours, byzfl.GeometricMedian(nu=0.1, T=400)(vectors), rtol=1e-6, atol=1e-6)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_each_rule_by_hand() -> None:
    """Five numbers on two equal axes: 0, 1, 2, 3 and an outlier."""
    column = np.array([0.0, 1.0, 2.0, 3.0, 100.0])
    vectors = np.stack([column, column], axis=1)
    assert merged(Median(), vectors).tolist() == [2, 2]
    assert merged(Median(), vectors[:4]).tolist() == [1.5, 1.5]
    assert merged(TrimmedMean(f=1), vectors).tolist() == [2, 2]  # (1 + 2 + 3) / 3
    assert merged(TrimmedMean(f=0), vectors).tolist() == [21.2, 21.2]
    # squared distances to the three nearest, halved: 1+4+9, 1+1+4, 1+1+4, 1+4+9: 1 and 2 tie, the first is taken
    assert merged(Krum(f=1), vectors).tolist() == [1, 1]
    assert merged(MultiKrum(f=1), vectors).tolist() == [1.5, 1.5]
    assert merged(MultiKrum(f=1, keep=2), vectors).tolist() == [1.5, 1.5]
    # the four nearest of 0..3 are 0..3; of 100 they are 100, 3, 2, 1: means 1.5 four times, and 26.5
    np.testing.assert_allclose(
        merged(NearestNeighbourMixing(f=1, then=WeightedMean()), vectors), [(4 * 1.5 + 26.5) / 5] * 2, rtol=1e-15
    )
    np.testing.assert_allclose(merged(GeometricMedian(), vectors), [2, 2], atol=1e-6)


def test_bulyan_by_hand() -> None:
    """n = 7, f = 1: five are chosen, without 50 and -40; of 0..4, the three nearest to 2 have mean 2."""
    column = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 50.0, -40.0])
    assert merged(Bulyan(f=1), np.stack([column, 2 * column], axis=1)).tolist() == [2, 4]


def test_centred_clipping_by_hand() -> None:
    """Around 0 with tau = 1: (3, 4) becomes (0.6, 0.8), (0.5, 0) stays; their mean is (0.55, 0.4)."""
    vectors = np.array([[3.0, 4.0], [0.5, 0.0]])
    zero = {"params": {"a": torch.zeros(1).double(), "b": torch.zeros(1, 1).double()}, "buffers": {}}
    got = CentredClipping(tau=1.0).merge_around(models_of(vectors), uniform(2), zero)
    np.testing.assert_allclose(vector(got), [0.55, 0.4], rtol=0, atol=1e-15)
    got = CentredClipping(tau=1.0).merge_around(models_of(vectors), torch.tensor([0.25, 0.75]).double(), zero)
    np.testing.assert_allclose(vector(got), [0.25 * 0.6 + 0.75 * 0.5, 0.2], rtol=0, atol=1e-15)


def test_the_default_clipping_radius_is_the_median_distance() -> None:
    """Distances 1, 2, 9 from the centre: the last is cut to 2."""
    vectors = np.array([[1.0, 0.0], [0.0, 2.0], [9.0, 0.0]])
    zero = {"params": {"a": torch.zeros(1).double(), "b": torch.zeros(1, 1).double()}, "buffers": {}}
    got = vector(CentredClipping().merge_around(models_of(vectors), uniform(3), zero))
    np.testing.assert_allclose(got, [1, 2 / 3], rtol=1e-15)


def test_weights_count_where_they_are_said_to_and_nowhere_else() -> None:
    vectors = np.random.default_rng(1).normal(size=(9, 4))
    odd = torch.from_numpy(np.random.default_rng(2).dirichlet(np.ones(9)))
    for rule in RULES:
        changes = not np.allclose(merged(rule, vectors), merged(rule, vectors, odd), rtol=0, atol=1e-9)
        assert changes == uses_weights(rule), rule


def test_a_weight_of_two_is_two_copies() -> None:
    vectors = np.random.default_rng(3).normal(size=(5, 4))
    doubled = np.concatenate([vectors, vectors[:1]])
    weights = torch.tensor([2.0, 1, 1, 1, 1], dtype=torch.float64) / 6
    np.testing.assert_allclose(
        merged(GeometricMedian(), vectors, weights), merged(GeometricMedian(), doubled), rtol=0, atol=1e-8
    )


# --- what every rule must keep to ------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("seed", range(5))
def test_order_of_clients_does_not_matter(rule: Combine, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors, order = rng.normal(size=(9, 30)), rng.permutation(9)
    np.testing.assert_allclose(merged(rule, vectors[order]), merged(rule, vectors), rtol=0, atol=1e-12)


@each_rule
def test_agreement_is_kept(rule: Combine) -> None:
    """All alike, all zero, and all but one alike."""
    one = np.random.default_rng(0).normal(size=6)
    for common in (one, np.zeros(6)):
        same = np.tile(common, (9, 1))
        np.testing.assert_allclose(merged(rule, same), common, rtol=0, atol=1e-14)
    if isinstance(rule, CentredClipping) or getattr(rule, "then", None) == CentredClipping():
        return  # it is moved, by a bounded amount: a test of its own
    strays = np.tile(one, (9, 1))
    strays[4] = 1e9
    np.testing.assert_allclose(merged(rule, strays), one, rtol=0, atol=1e-6 if "Geometric" in str(rule) else 1e-12)


@each_rule
@pytest.mark.parametrize("size", [1e3, 1e9, 1e20, 1e30])
def test_one_reply_moves_the_model_by_a_bounded_amount(rule: Combine, size: float) -> None:
    rng = np.random.default_rng(7)
    honest = rng.normal(size=(8, 20))
    spread = pairs(honest).max()
    far = np.concatenate([honest, np.full((1, 20), size)])
    assert np.linalg.norm(merged(rule, far) - honest.mean(0)) <= 2 * spread


@each_rule
def test_translation_and_scale_go_through(rule: Combine) -> None:
    vectors, shift = np.random.default_rng(5).normal(size=(9, 8)), np.arange(8.0)
    np.testing.assert_allclose(merged(rule, vectors + shift), merged(rule, vectors) + shift, rtol=0, atol=1e-9)
    if getattr(rule, "tau", None) is None:
        np.testing.assert_allclose(merged(rule, 8 * vectors), 8 * merged(rule, vectors), rtol=0, atol=1e-6)


@each_rule
def test_buffers_of_every_kind(rule: Combine) -> None:
    """Counters take the largest, flags any, and one client's running mean of 1e30 does no harm."""
    models = models_of(np.random.default_rng(0).normal(size=(9, 4)), torch.float32)
    mean = torch.ones(9, 3)
    mean[2] = 1e30
    flag = torch.zeros(9, 2, dtype=torch.bool)
    flag[5, 1] = True
    models["buffers"] = {"mean": mean, "n": torch.arange(9).reshape(9, 1), "flag": flag}
    got = rule.merge(models, uniform(9))
    assert tiny.structure(got) == tiny.structure({k: {n: v[0] for n, v in t.items()} for k, t in models.items()})
    assert got["buffers"]["mean"].tolist() == [1, 1, 1]
    assert got["buffers"]["n"].tolist() == [8] and got["buffers"]["flag"].tolist() == [False, True]


@each_rule
def test_inputs_are_not_modified_and_half_precision_does_not_overflow(rule: Combine) -> None:
    models = models_of(np.full((9, 4), 60_000.0), torch.float16)
    before = {name: leaf.clone() for name, leaf in models["params"].items()}
    got = rule.merge(models, uniform(9))
    assert vector(got).tolist() == [60_000] * 4
    assert all(torch.equal(models["params"][name], leaf) for name, leaf in before.items())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rule", [TrimmedMean(f=1), Krum(f=1), MultiKrum(f=1), Bulyan(f=1)], ids=str)
def test_rules_that_leave_replies_out_survive_one_that_is_not_finite(rule: Combine, value: float) -> None:
    """The training loop drops such replies before any rule; these rules do not even depend on it."""
    vectors = np.random.default_rng(0).normal(size=(9, 4))
    vectors[4] = value
    if isinstance(rule, Bulyan) and np.isnan(value):
        vectors[4] = np.inf
    assert np.isfinite(merged(rule, vectors)).all()


def test_a_bad_round_does_not_spoil_later_ones() -> None:
    """Centred clipping keeps no centre between rounds."""
    rule, vectors = CentredClipping(tau=1.0), np.random.default_rng(0).normal(size=(5, 4))
    expected = merged(rule, vectors)
    merged(rule, np.full((5, 4), np.nan))
    assert merged(rule, vectors).tolist() == expected.tolist()


# --- f and n ---------------------------------------------------------------------------------------------------------

Build = Callable[[Any], Combine]


@pytest.mark.parametrize(
    ("build", "f", "least", "printed"),
    [
        (lambda f: TrimmedMean(f=f), 2, 5, "n >= 2f + 1 = 5 replies, but n = 4"),
        (lambda f: Krum(f=f), 1, 5, "n >= 2f + 3 = 5 replies, but n = 4"),
        (lambda f: MultiKrum(f=f), 2, 7, "n >= 2f + 3 = 7 replies, but n = 6"),
        (lambda f: Bulyan(f=f), 1, 7, "n >= 4f + 3 = 7 replies, but n = 6"),
        (lambda f: NearestNeighbourMixing(f=f, then=Median()), 1, 3, "n >= 2f + 1 = 3 replies, but n = 2"),
        (lambda f: NearestNeighbourMixing(f=0, then=Krum(f=f)), 1, 5, "n >= 2f + 3 = 5 replies, but n = 4"),
    ],
)
def test_too_few_replies_are_refused_with_the_inequality(build: Build, f: int, least: int, printed: str) -> None:
    rule = build(f)
    server = Averaging(combine=rule, weighting=UniformWeights())
    start = {"params": {"a": torch.zeros(2, dtype=torch.float64)}, "buffers": {}}
    server.init(start, least)
    merged(rule, np.zeros((least, 2)))
    for refused in (
        lambda: server.init(start, least - 1),
        lambda: merged(rule, np.zeros((least - 1, 2))),
        lambda: rule.check_against(least - 1),  # type: ignore[attr-defined]
    ):
        with pytest.raises(Invalid) as problem:
            refused()
        assert printed in str(problem.value)


def test_one_client_only() -> None:
    """FAULTS 28: nothing to defend against with f = 0, or refused."""
    one = np.array([[3.0, -1.0]])
    for rule in (Median(), TrimmedMean(), GeometricMedian(), Krum(), MultiKrum(), Bulyan(), CentredClipping()):
        np.testing.assert_allclose(merged(rule, one), one[0], rtol=1e-15)
    np.testing.assert_allclose(merged(NearestNeighbourMixing(), one), one[0])
    for refused in (TrimmedMean(f=1), Krum(f=1), MultiKrum(f=1), Bulyan(f=1)):
        with pytest.raises(Invalid, match="replies, but n = 1"):
            merged(refused, one)


def test_shares_are_rounded_down() -> None:
    assert [faulty(0.2, n) for n in (1, 4, 5, 9, 10, 14, 15)] == [0, 0, 1, 1, 2, 2, 3]
    assert faulty(0.3, 10) == 3 and faulty(0.29, 100) == 29 and faulty(4, 3) == 4


@pytest.mark.parametrize("f", [-1, 0.5, 1.0, float("nan"), "two", True])
def test_an_f_that_makes_no_sense_is_refused(f: Any) -> None:
    for build in (TrimmedMean, Krum, MultiKrum, Bulyan, NearestNeighbourMixing):
        with pytest.raises(Invalid, match=rf"{build.__name__}\.f"):
            build(f=f)


def test_more_to_keep_than_can_be_honest_is_refused() -> None:
    MultiKrum(f=2, keep=5).check_against(7)
    with pytest.raises(Invalid, match="keep = 6 and f = 2 needs keep <= n - f = 5"):
        MultiKrum(f=2, keep=6).check_against(7)


def test_weights_that_would_have_no_effect_are_refused() -> None:
    with pytest.raises(Invalid, match=r"Krum.* counts every reply the same, .*SimProxWeights.* no effect"):
        Averaging(combine=Krum(f=1), weighting=SimProxWeights())
    Averaging(combine=GeometricMedian(), weighting=SimProxWeights())


def test_the_server_clips_around_the_model_it_sent() -> None:
    server = Averaging(combine=CentredClipping(tau=1.0), weighting=UniformWeights())
    start = {"params": {"w": torch.tensor([10.0, 0.0], dtype=torch.float64)}, "buffers": {}}
    cohort = Cohort(
        reply={"model": {"params": {"w": torch.tensor([[13.0, 4.0], [13.0, 4.0]]).double()}, "buffers": {}}},
        ids=np.arange(2),
        examples=torch.ones(2, dtype=torch.float64),
        steps=np.ones(2, dtype=np.int64),
        round=0,
    )
    after, _ = server.update(server.init(start, 2), cohort)
    np.testing.assert_allclose(after["model"]["params"]["w"].numpy(), [10.6, 0.8], rtol=1e-15)
