"""Paired tests: hand-computed cases, SciPy's own t test, and what any such test must satisfy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from consilience.compare.paired import Paired, paired, permutation_p, sign_p

values = st.lists(st.floats(-1, 1).map(lambda v: round(v, 6)), min_size=2, max_size=9)


def test_three_differences_by_hand() -> None:
    found = paired([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert found.n == 3 and found.mean == 2.0 and found.deviation == 1.0
    assert found.p_t == pytest.approx(0.0741799, abs=1e-6)  # t = 2 sqrt(3) with two degrees of freedom
    half = 4.302653 / np.sqrt(3)
    assert (found.low, found.high) == (pytest.approx(2 - half, abs=1e-6), pytest.approx(2 + half, abs=1e-6))
    assert found.p_permutation == found.p_sign == found.least_p == 0.25  # two of eight sign patterns are as far out
    assert found.verdict == "not shown"


def test_a_clear_difference_needs_six_seeds_to_be_shown_exactly() -> None:
    few = paired([1.0, 1.1, 0.9, 1.05, 0.95], [0.0] * 5)
    assert few.verdict == "larger (t only)" and few.least_p == 0.0625
    many = paired([1.0, 1.1, 0.9, 1.05, 0.95, 1.0], [0.0] * 6)
    assert many.p_permutation == 2 / 64 and many.verdict == "larger"
    assert paired([0.0] * 6, [1.0, 1.1, 0.9, 1.05, 0.95, 1.0]).verdict == "smaller"


def test_few_seeds_are_called_few() -> None:
    assert paired([], []) == Paired(n=0)
    assert paired([0.5], [0.25]) == Paired(n=1, mean=0.25)
    assert paired([0.5], [0.25]).verdict == "n too small" and paired([], []).verdict == "n too small"


def test_equal_methods_are_equal() -> None:
    found = paired([0.5, 0.7], [0.5, 0.7])
    assert (found.mean, found.low, found.high, found.p_t, found.p_permutation, found.p_sign) == (0, 0, 0, 1, 1, 1)
    assert found.verdict == "equal"


def test_a_difference_without_spread_has_no_t() -> None:
    found = paired([1.0, 1.0], [0.5, 0.5])
    assert found.p_t is None and found.low == found.high == 0.5 and found.verdict == "not shown"


def test_ties_say_nothing_in_the_sign_test() -> None:
    assert sign_p(np.array([0.0, 0.0, 1.0, 2.0, 3.0])) == 0.25
    assert sign_p(np.array([1.0, -1.0])) == 1.0


@given(values)
def test_t_is_scipys(differences: list[float]) -> None:
    found = paired(differences, [0.0] * len(differences))
    if found.deviation and found.deviation > 1e-9:
        theirs = stats.ttest_1samp(differences, 0.0)
        interval = theirs.confidence_interval(0.95)
        assert found.p_t == pytest.approx(theirs.pvalue, abs=1e-9)
        assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


@given(values)
def test_permutation_p_is_scipys(differences: list[float]) -> None:
    array = np.round(np.array(differences) * 1024) / 1024  # sums without rounding, for scipy has no tolerance for it
    theirs = stats.permutation_test(
        (array,), lambda x, axis: x.mean(axis), permutation_type="samples", n_resamples=np.inf, vectorized=True
    )
    assert permutation_p(array) == pytest.approx(theirs.pvalue)


@given(values)
def test_directions_and_scales_do_not_matter(differences: list[float]) -> None:
    array = np.array(differences)
    least = 2.0 ** (1 - len(array))
    for same in (-array, 8 * array, array[::-1].copy()):
        assert permutation_p(same) == permutation_p(array) >= least
        assert sign_p(same) == sign_p(array) >= least


def test_many_seeds_are_drawn_not_enumerated() -> None:
    """With 20 differences of the same sign the exact p is 2^-19; the drawn one is as small as its draws allow."""
    assert 0 < permutation_p(np.ones(20) + np.arange(20) * 1e-3) < 1e-4  # the observed pattern is one of them
    mixed = np.array([1.0, -1.0] * 10)
    assert permutation_p(mixed) == 1.0
