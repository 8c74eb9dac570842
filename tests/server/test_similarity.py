"""The metrics against plain-numpy definitions, closed forms, invariances and degenerate input."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from consilience.core.settings import Invalid
from consilience.server.geometry import gram_rows, similarity
from consilience.server.geometry.similarity import (
    METRICS,
    all_pairs,
    cca,
    cca_mean_squared,
    cka_debiased,
    cka_deconfounded,
    cka_linear,
    cka_rbf,
    gram_linear,
    gram_rbf,
    hsic,
    osad,
)

PAIRWISE = {
    "cka_linear": cka_linear,
    "cka_rbf": cka_rbf,
    "cka_debiased": cka_debiased,
    "cca": cca,
    "hsic": hsic,
    "osad": osad,
}
seeds = st.integers(0, 2**31)


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def value(metric: str, x: np.ndarray, y: np.ndarray) -> float:
    return float(PAIRWISE[metric](tensor(x), tensor(y)))


# --- the definitions, term by term, in numpy --------------------------------------------------------------------------


def np_centre(n: int) -> np.ndarray:
    return np.eye(n) - np.ones((n, n)) / n


def np_hsic(k: np.ndarray, other: np.ndarray) -> float:
    n = len(k)
    h = np_centre(n)
    return float(np.trace(k @ h @ other @ h)) / (n - 1) ** 2


def np_cka(k: np.ndarray, other: np.ndarray) -> float:
    return np_hsic(k, other) / np.sqrt(np_hsic(k, k) * np_hsic(other, other))


def np_rbf(x: np.ndarray, bandwidth: float = 0.5, offdiag: bool = False) -> np.ndarray:
    n = len(x)
    d2 = np.array([[((x[i] - x[j]) ** 2).sum() for j in range(n)] for i in range(n)])
    median = np.median(d2[~np.eye(n, dtype=bool)]) if offdiag else np.median(d2)
    return np.exp(-d2 / (2 * (bandwidth * np.sqrt(median)) ** 2))


def np_hsic_unbiased(k: np.ndarray, other: np.ndarray) -> float:
    """Song et al. 2012, equation 5."""
    n = len(k)
    k, other = k.copy(), other.copy()
    np.fill_diagonal(k, 0)
    np.fill_diagonal(other, 0)
    one = np.ones(n)
    first = np.trace(k @ other)
    second = (one @ k @ one) * (one @ other @ one) / ((n - 1) * (n - 2))
    third = 2 * (one @ k @ other @ one) / (n - 2)
    return float(first + second - third) / (n * (n - 3))


def np_cka_debiased(x: np.ndarray, y: np.ndarray) -> float:
    k, other = x @ x.T, y @ y.T
    return np_hsic_unbiased(k, other) / np.sqrt(np_hsic_unbiased(k, k) * np_hsic_unbiased(other, other))


def np_cca(x: np.ndarray, y: np.ndarray) -> float:
    """Eigenvalues of Sxx^-1 Sxy Syy^-1 Syx are the squared correlations."""
    x, y = x - x.mean(0), y - y.mean(0)
    product = np.linalg.solve(x.T @ x, x.T @ y) @ np.linalg.solve(y.T @ y, y.T @ x)
    squared = np.sort(np.linalg.eigvals(product).real)[::-1]
    return float(squared[: min(x.shape[1], y.shape[1])].mean())


def np_residual(k: np.ndarray, z: np.ndarray) -> np.ndarray:
    design = np.stack([np.ones(z.size), z.ravel()], axis=1)
    fit, *_ = np.linalg.lstsq(design, k.ravel(), rcond=None)
    return k - (design @ fit).reshape(k.shape)


DEFINITIONS = {
    "cka_linear": lambda x, y: np_cka(x @ x.T, y @ y.T),
    "cka_rbf": lambda x, y: np_cka(np_rbf(x), np_rbf(y)),
    "cka_debiased": np_cka_debiased,
    "cca": np_cca,
    "hsic": lambda x, y: np_hsic(x @ x.T, y @ y.T),
    "osad": lambda x, y: -np.abs(x - y).sum(),
}


@pytest.mark.parametrize("metric", PAIRWISE)
@given(seed=seeds, n=st.integers(8, 24), p=st.integers(1, 5), offset=st.sampled_from([0.0, 3.0]))
@settings(max_examples=15, deadline=None)
def test_metrics_equal_their_definitions(metric: str, seed: int, n: int, p: int, offset: float) -> None:
    x, y = normal(n, p, seed=seed) + offset, normal(n, p, seed=seed + 1)
    assert value(metric, x, y) == pytest.approx(DEFINITIONS[metric](x, y), rel=1e-9, abs=1e-10)
    assert value(metric, y, x) == pytest.approx(value(metric, x, y), rel=1e-12)


@pytest.mark.parametrize("metric", [name for name in PAIRWISE if name != "osad"])
def test_widths_may_differ(metric: str) -> None:
    x, y = normal(20, 3, seed=0), normal(20, 6, seed=1)
    y[:, :2] += x[:, :2]
    assert value(metric, x, y) == pytest.approx(DEFINITIONS[metric](x, y), rel=1e-10)


@pytest.mark.parametrize("n", [9, 10])  # an odd and an even number of distances: the median is the midpoint
@pytest.mark.parametrize("offdiag", [False, True])
@pytest.mark.parametrize("bandwidth", [0.5, 1.5])
def test_rbf_bandwidths(n: int, offdiag: bool, bandwidth: float) -> None:
    x, y = normal(n, 3, seed=0), normal(n, 3, seed=1)
    expected = np_cka(np_rbf(x, bandwidth, offdiag), np_rbf(y, bandwidth, offdiag))
    options = {"bandwidth": bandwidth, "offdiag": offdiag}
    assert float(cka_rbf(tensor(x), tensor(y), **options)) == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gram_rbf(tensor(x), **options).numpy(), np_rbf(x, bandwidth, offdiag), rtol=1e-12)


def test_the_rbf_median_counts_the_zero_diagonal_by_hand() -> None:
    # three points on a line, 0, 1 and 3: squared distances 0 0 0 1 1 4 4 9 9, whose median is 1 (off the diagonal: 4)
    x = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    assert float(gram_rbf(x)[0, 1]) == pytest.approx(np.exp(-1 / (2 * 0.25 * 1)))
    assert float(gram_rbf(x, offdiag=True)[0, 1]) == pytest.approx(np.exp(-1 / (2 * 0.25 * 4)))


def np_positive(k: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(k)
    return vectors @ np.diag(np.maximum(values, 0)) @ vectors.T


def test_deconfounded_cka_is_cka_of_the_residuals() -> None:
    x, y, z = (normal(12, p, seed=p) for p in (3, 4, 5))
    k, other, third = ((one @ one.T) for one in (x + z[:, :3], y - z[:, :4], z))  # not centred
    left, right = np_residual(k, third), np_residual(other, third)
    grams = tensor(k), tensor(other), tensor(third)
    expected = {"remove": np_cka(np_positive(left), np_positive(right)), "keep": np_cka(left, right)}
    assert float(cka_deconfounded(*grams)) == pytest.approx(expected["remove"], rel=1e-10)
    assert float(cka_deconfounded(*grams, negative_eigenvalues="keep")) == pytest.approx(expected["keep"], rel=1e-10)
    # the confounder matters here, and so do the eigenvalues
    assert min(abs(one - np_cka(k, other)) for one in expected.values()) > 0.01
    assert abs(expected["remove"] - expected["keep"]) > 0.1


@pytest.mark.parametrize("shape", [(3, 40, 4), (3, 9, 7), (2, 6, 6)])  # p + q below, above and at n
def test_residuals_without_negative_eigenvalues_by_features_are_those_by_gram_matrices(
    shape: tuple[int, int, int],
) -> None:
    stacked, z = tensor(normal(*shape, seed=0)), tensor(normal(shape[1], 4, seed=1))
    stacked = stacked + z[:, :1] * torch.tensor([[[3.0]], [[-2.0]], [[0.5]]], dtype=torch.float64)[: shape[0]]
    got = all_pairs("cka_deconfounded", stacked, confounder=z).numpy()
    residuals = [np_positive(np_residual(gram_linear(x).numpy(), gram_linear(z).numpy())) for x in stacked]
    expected = [[np_cka(a, b) for b in residuals] for a in residuals]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-10)
    kept = all_pairs("cka_deconfounded", stacked, confounder=z, negative_eigenvalues="keep").numpy()
    residuals = [np_residual(gram_linear(x).numpy(), gram_linear(z).numpy()) for x in stacked]
    np.testing.assert_allclose(kept, [[np_cka(a, b) for b in residuals] for a in residuals], rtol=1e-9, atol=1e-10)


def test_deconfounding_takes_out_any_multiple_of_the_confounder() -> None:
    k, other, z = (gram_linear(tensor(normal(10, 3, seed=seed))) for seed in range(3))
    plain = cka_deconfounded(k, other, z)
    torch.testing.assert_close(cka_deconfounded(k + 7 * z, 3 * other - 2 * z, 5 * z), plain, rtol=1e-9, atol=1e-12)


def test_a_kernel_that_is_its_own_confounder_has_nothing_left() -> None:
    k, other = (gram_linear(tensor(normal(30, 5, seed=seed))) for seed in range(2))
    assert float(cka_deconfounded(k, other, k)) == 0  # the authors' code divides rounding by rounding here
    assert float(cka_deconfounded(k, k, 2 * k)) == 0


# --- closed forms and numbers seen elsewhere --------------------------------------------------------------------------


def test_two_columns_by_hand() -> None:
    # centred columns a = (1, -1, 0, 0), b = (1, 1, -1, -1): <a, b> = 0, |a|^2 = 2, |b|^2 = 4
    x = torch.tensor([[1.0], [-1.0], [0.0], [0.0]], dtype=torch.float64)
    y = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]], dtype=torch.float64)
    assert float(cka_linear(x, y)) == 0 and float(cca(x, y)) == 0 and float(hsic(x, y)) == 0
    both = x + y  # <a, a + b> = 2, |a + b|^2 = 6: squared correlation 4 / 12
    assert float(cka_linear(x, both)) == pytest.approx(1 / 3)
    assert float(cca(x, both)) == pytest.approx(1 / 3)
    assert float(hsic(x, both)) == pytest.approx(4 / 9)  # <a, a + b>^2 / (n - 1)^2
    assert float(osad(x, both)) == -4


def test_hsic_is_quartic_in_the_scale() -> None:
    x, y = tensor(normal(9, 3, seed=0)), tensor(normal(9, 3, seed=1))
    assert float(hsic(2 * x, 2 * y)) == pytest.approx(16 * float(hsic(x, y)))
    assert float(hsic(1e30 * x, y)) == pytest.approx(1e60 * float(hsic(x, y)))


def test_cca_is_the_mean_of_squares_not_the_square_of_the_mean() -> None:
    x = normal(4000, 2, seed=0)
    y = np.stack([x[:, 0], normal(4000, seed=1)], axis=1)  # correlations about 1 and 0
    assert value("cca", x, y) == pytest.approx(0.5, abs=0.01)
    assert cca is cca_mean_squared


def test_which_side_are_examples_is_decisive() -> None:
    """READINGS S3-4: unrelated Gaussian layers of shape (100, 784)."""
    x, y = normal(100, 784, seed=0), normal(100, 784, seed=1)
    assert value("cka_linear", x, y) == pytest.approx(0.885, abs=0.01)
    assert value("cca", x, y) == pytest.approx(1, abs=1e-10)
    assert value("cka_linear", x.T, y.T) == pytest.approx(0.112, abs=0.01)
    assert value("cca", x.T, y.T) == pytest.approx(0.128, abs=0.005)
    assert abs(value("cka_debiased", x, y)) < 0.05  # debiasing does what it is for


# --- invariances ------------------------------------------------------------------------------------------------------


def rotation(p: int, seed: int) -> np.ndarray:
    return np.linalg.qr(normal(p, p, seed=seed))[0]


@pytest.mark.parametrize("metric", ["cka_linear", "cka_rbf", "cka_debiased", "cca"])
@given(seed=seeds, scale=st.floats(1e-6, 1e6))
@settings(max_examples=15, deadline=None)
def test_rotation_shift_and_isotropic_scale_do_not_matter(metric: str, seed: int, scale: float) -> None:
    x, y = normal(16, 4, seed=seed), normal(16, 4, seed=seed + 1)
    moved = scale * (x @ rotation(4, seed + 2)) + scale * normal(4, seed=seed + 3)
    assert value(metric, moved, y) == pytest.approx(value(metric, x, y), abs=1e-9)
    assert value(metric, moved, x) == pytest.approx(1, abs=1e-9)
    order = np.random.default_rng(seed).permutation(16)
    assert value(metric, x[order], y[order]) == pytest.approx(value(metric, x, y), abs=1e-10)


@given(seed=seeds)
@settings(max_examples=15, deadline=None)
def test_cca_is_unmoved_by_any_invertible_map_and_cka_is_not(seed: int) -> None:
    x, y = normal(16, 4, seed=seed), normal(16, 4, seed=seed + 1)
    stretch = rotation(4, seed + 2) @ np.diag([1, 10, 100, 1e4]) @ rotation(4, seed + 3)
    assert value("cca", x @ stretch, y) == pytest.approx(value("cca", x, y), abs=1e-8)
    assert value("cca", x * [1e-9, 1, 1e9, 1e15], y) == pytest.approx(value("cca", x, y), abs=1e-8)
    assert abs(value("cka_linear", x @ stretch, x) - 1) > 1e-3


@pytest.mark.parametrize("metric", ["cka_linear", "cka_rbf", "cca"])
@given(seed=seeds, n=st.integers(2, 12), p=st.integers(1, 12), q=st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_values_lie_between_0_and_1(metric: str, seed: int, n: int, p: int, q: int) -> None:
    assert -1e-12 <= value(metric, normal(n, p, seed=seed), normal(n, q, seed=seed + 1)) <= 1


# --- all pairs at once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 30, 2), (5, 9, 7), (1, 6, 3), (12, 8, 8)])  # by features, by Gram matrices
@pytest.mark.parametrize("metric", METRICS)
def test_all_pairs_are_the_pairs(metric: str, shape: tuple[int, int, int]) -> None:
    stacked, confounder = tensor(normal(*shape, seed=0)), tensor(normal(shape[1], 4, seed=1))
    got = all_pairs(metric, stacked, confounder=confounder)
    assert got.shape == (shape[0], shape[0]) and got.dtype == torch.float64
    assert torch.equal(got, got.T)
    third = gram_linear(confounder)
    for i, x in enumerate(stacked):
        for j, y in enumerate(stacked):
            if metric == "cka_deconfounded":
                expected = cka_deconfounded(gram_linear(x), gram_linear(y), third)
            else:
                expected = PAIRWISE[metric](x, y)
            assert float(got[i, j]) == pytest.approx(float(expected), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("metric", METRICS)
def test_few_rows_at_a_time_give_the_same(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stacked, confounder = tensor(normal(4, 23, 6, seed=0)), tensor(normal(23, 4, seed=1))
    expected = all_pairs(metric, stacked, confounder=confounder)
    monkeypatch.setattr(gram_rows, "AT_ONCE", 4 * 23 * 5)  # five rows of four matrices
    monkeypatch.setattr(gram_rows, "KEPT", 0)
    torch.testing.assert_close(all_pairs(metric, stacked, confounder=confounder), expected, rtol=1e-12, atol=1e-12)


def test_stacks_of_different_widths_are_compared_crosswise() -> None:
    first, second = tensor(normal(3, 10, 2, seed=0)), tensor(normal(3, 10, 5, seed=1))
    got = similarity.between("cka_linear", [first, second])
    assert got.shape == (2, 2, 3, 3)
    assert float(got[0, 1, 2, 0]) == pytest.approx(float(cka_linear(first[2], second[0])), rel=1e-12)
    assert float(got[1, 0, 0, 2]) == float(got[0, 1, 2, 0])


def test_single_precision_is_compared_in_double() -> None:
    x, y = normal(12, 3, seed=0).astype(np.float32), normal(12, 3, seed=1).astype(np.float32)
    assert value("cka_linear", x, y) == value("cka_linear", x.astype(np.float64), y.astype(np.float64))


# --- degenerate input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [name for name in PAIRWISE if name != "osad"])
@pytest.mark.parametrize("constant", [0.0, 0.1, 1e30, -1e-30])
def test_rows_that_are_all_alike_are_similar_to_nothing(metric: str, constant: float) -> None:
    flat, x = np.full((12, 3), constant), normal(12, 3, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for left, right in ((flat, flat), (flat, x), (x, flat)):
            assert value(metric, left, right) == 0


@pytest.mark.parametrize("metric", ["cka_linear", "cka_rbf", "cka_debiased", "cca"])
@pytest.mark.parametrize("size", [1e30, 1e150, 1e-30, 1e-150])
def test_huge_and_tiny_values_are_compared_like_others(metric: str, size: float) -> None:
    x, y = normal(12, 3, seed=0), normal(12, 3, seed=1)
    assert value(metric, size * x, y) == pytest.approx(value(metric, x, y), rel=1e-10)
    assert value(metric, size * x, size * x) == pytest.approx(1)


@pytest.mark.parametrize("metric", PAIRWISE)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_examples_give_numbers(metric: str, n: int) -> None:
    assert np.isfinite(value(metric, normal(n, 2, seed=0), normal(n, 2, seed=1)))
    if metric == "cka_debiased":
        assert value(metric, normal(n, 2, seed=0), normal(n, 2, seed=0)) == 0


def test_a_median_of_zero_gives_the_limit_kernel() -> None:
    x = np.zeros((8, 2))
    x[0], x[1] = 1.0, 2.0  # more than half of all pairs coincide
    kernel = gram_rbf(tensor(x)).numpy()
    expected = (x[:, None] == x[None]).all(2).astype(float)
    assert np.array_equal(kernel, expected)
    assert value("cka_rbf", x, x) == pytest.approx(1)


def test_rank_deficient_columns_count_once() -> None:
    x, y = normal(15, 2, seed=0), normal(15, 2, seed=1)
    doubled = np.concatenate([x, x @ [[1.0, 2.0], [3.0, 4.0]]], axis=1)
    assert value("cca", doubled, y) == pytest.approx(np_cca(x, y), abs=1e-9)


def test_refusals_say_what_is_wrong() -> None:
    x = torch.ones(3, 2)
    with pytest.raises(Invalid, match="cka_linear compares matrices with the same number of rows, not"):
        cka_linear(x, torch.ones(4, 2))
    with pytest.raises(Invalid, match=r"osad compares matrices of one shape, not \(3, 2\), \(3, 4\)"):
        osad(x, torch.ones(3, 4))
    with pytest.raises(Invalid, match=r"hsic takes 2-d tensors with something in them, not the shape \(3,\)"):
        hsic(torch.ones(3), x)
    with pytest.raises(Invalid, match="cca was given NaN or infinite values"):
        cca(x, torch.tensor([[1.0, np.nan]] * 3))
    with pytest.raises(Invalid, match=r"three Gram matrices \[n, n\] of the same rows"):
        cka_deconfounded(torch.eye(3), torch.eye(3), torch.eye(4))
    with pytest.raises(Invalid, match="cka_deconfounded needs a confounder"):
        all_pairs("cka_deconfounded", torch.ones(2, 3, 2))
    with pytest.raises(Invalid, match="did you mean 'cka_linear'"):
        all_pairs("cka_linar", torch.ones(2, 3, 2))  # type: ignore[arg-type]
