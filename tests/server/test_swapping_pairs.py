"""Who swaps with whom, against hand-worked matrices, brute force, and counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.server.geometry.pairing import ExactMatching, Greedy, MinimumSimilarity, Pairing, Random

RULES = [Random(), Greedy(), MinimumSimilarity(), ExactMatching()]


def symmetric(upper: dict[tuple[int, int], float], m: int) -> np.ndarray:
    found = np.zeros((m, m))
    for (a, b), value in upper.items():
        found[a, b] = found[b, a] = value
    return found


def random_matrix(m: int, seed: int) -> np.ndarray:
    upper = np.triu(np.random.default_rng(seed).normal(size=(m, m)), 1)
    return upper + upper.T + np.eye(m)


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def matchings(left: tuple[int, ...], count: int) -> Iterator[list[tuple[int, int]]]:
    """Every set of `count` disjoint pairs."""
    if count == 0:
        yield []
    elif len(left) >= 2 * count:
        first, rest = left[0], left[1:]
        for k, other in enumerate(rest):
            for more in matchings(rest[:k] + rest[k + 1 :], count - 1):
                yield [(first, other), *more]
        yield from matchings(rest, count)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@given(m=st.integers(0, 9), seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=30, deadline=None)
def test_pairs_are_disjoint_and_as_many_as_wanted(rule: Pairing, m: int, seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, m // 2))
    pairs = rule.pairs(random_matrix(m, seed), count, draw(seed))
    places = [place for pair in pairs for place in pair]
    assert len(pairs) == count and len(set(places)) == 2 * count
    assert all(0 <= place < m for place in places)


def test_minimum_similarity_as_in_figure_2() -> None:
    # clients 1..6 of the figure are 0..5 here: s35 is the least, then s24, and 1 and 6 are left over
    values = {(a, b): 10.0 + a + b for a in range(6) for b in range(a + 1, 6)}
    values |= {(2, 4): 1.0, (1, 3): 3.0, (2, 5): 2.0, (0, 4): 2.5}  # 2.0 and 2.5 are struck with 3 and 5
    found = MinimumSimilarity().pairs(symmetric(values, 6), 3, draw())
    assert found == [(2, 4), (1, 3), (0, 5)]
    assert MinimumSimilarity().pairs(symmetric(values, 6), 2, draw()) == [(2, 4), (1, 3)]


def test_minimum_similarity_is_not_the_least_total() -> None:
    # READINGS S3-12: total 51 against an optimum of 4
    values = {(0, 1): 1.0, (2, 3): 50.0, (0, 2): 2.0, (1, 3): 2.0, (0, 3): 60.0, (1, 2): 60.0}
    matrix = symmetric(values, 4)
    greedy, exact = (rule.pairs(matrix, 2, draw()) for rule in (MinimumSimilarity(), ExactMatching()))
    assert sum(matrix[pair] for pair in greedy) == 51
    assert sum(matrix[pair] for pair in exact) == 4 and exact == [(0, 2), (1, 3)]


@given(m=st.integers(2, 8), seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=40, deadline=None)
def test_exact_matching_is_the_least_total(m: int, seed: int, data: st.DataObject) -> None:
    count, matrix = data.draw(st.integers(1, m // 2)), random_matrix(m, seed)
    best = min(sum(matrix[pair] for pair in found) for found in matchings(tuple(range(m)), count))
    got = ExactMatching().pairs(matrix, count, draw())
    assert sum(matrix[pair] for pair in got) == pytest.approx(best, abs=1e-9)


def test_exact_matching_of_many() -> None:
    m = 40
    matrix = random_matrix(m, 3)
    exact, greedy = (sum(matrix[p] for p in rule.pairs(matrix, m // 2, draw())) for rule in (RULES[3], RULES[2]))
    assert exact < greedy


def test_greedy_takes_the_least_similar_of_those_left() -> None:
    matrix = random_matrix(7, 5)
    for seed in range(20):
        left = list(range(7))
        twin = draw(seed)
        pairs = Greedy().pairs(matrix, 3, draw(seed))
        assert len(pairs) == 3
        for base, partner in pairs:
            assert base == left[twin.integers(0, len(left))]
            left.remove(base)
            assert matrix[base, partner] == min(matrix[base, other] for other in left)
            left.remove(partner)


def test_greedy_can_start_anywhere_the_last_included() -> None:
    starts = [Greedy().pairs(random_matrix(4, 0), 1, draw(seed))[0][0] for seed in range(400)]
    assert np.bincount(starts, minlength=4).min() > 60 and max(starts) == 3


def test_random_pairs_are_all_equally_likely() -> None:
    seen = [tuple(sorted(Random().pairs(np.zeros((4, 4)), 1, draw(seed))[0])) for seed in range(1200)]
    counts = [seen.count((a, b)) for a in range(4) for b in range(a + 1, 4)]
    assert sum(counts) == 1200 and min(counts) > 150 and max(counts) < 250


@pytest.mark.parametrize("rule", [Greedy(), MinimumSimilarity()], ids=lambda rule: type(rule).__name__)
def test_ties_go_to_the_first_and_rounding_makes_no_difference(rule: Pairing) -> None:
    flat = np.full((6, 6), 0.7)
    noisy = flat + 1e-15 * random_matrix(6, 0)
    assert rule.pairs(flat, 3, draw(1)) == rule.pairs(noisy, 3, draw(1))
    assert MinimumSimilarity().pairs(noisy, 3, draw()) == [(0, 1), (2, 3), (4, 5)]
