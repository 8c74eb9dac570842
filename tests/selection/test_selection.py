"""Who takes part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.exchange import Pool
from consilience.core.settings import Invalid
from consilience.selection import Everyone, SlidingWindow, Uniform


def pool_of(clients: int, *, empty: tuple[int, ...] = (), away: tuple[int, ...] = ()) -> Pool:
    sizes, available = np.full(clients, 5), np.ones(clients, dtype=bool)
    sizes[list(empty)] = 0
    available[list(away)] = False
    return Pool(sizes=sizes, losses=np.full(clients, np.nan), available=available)


SELECTIONS = [
    Everyone(),
    Uniform(count=3),
    Uniform(fraction=0.4),
    Uniform(fraction=1),
    SlidingWindow(),
    SlidingWindow(fraction=0.01),
    SlidingWindow(fraction=1.0),
]
each_selection = pytest.mark.parametrize("selection", SELECTIONS, ids=str)


@each_selection
def test_choice_is_ascending_distinct_and_repeatable(selection: Any) -> None:
    pool = pool_of(11, empty=(2,), away=(7,))
    for round in range(12):
        for seed in (0, 5):
            chosen = selection.choose(round, pool, seed)
            assert chosen.dtype == np.int64
            assert chosen.tolist() == sorted(set(chosen.tolist()))
            assert chosen.tolist() == selection.choose(round, pool, seed).tolist()
            assert set(chosen.tolist()) <= set(range(11)) - {2, 7}


@each_selection
def test_nobody_there_means_nobody_chosen(selection: Any) -> None:
    assert len(selection.choose(0, pool_of(4, away=(0, 1), empty=(2, 3)), 0)) == 0


@each_selection
def test_the_pool_is_not_modified(selection: Any) -> None:
    pool = pool_of(6, away=(1,))
    before = (pool.sizes.copy(), pool.available.copy())
    selection.choose(3, pool, 1)
    assert (pool.sizes == before[0]).all() and (pool.available == before[1]).all()


def test_everyone() -> None:
    assert Everyone().choose(9, pool_of(5, empty=(0,), away=(3,)), 7).tolist() == [1, 2, 4]


# --- sliding window --------------------------------------------------------------------------------------------------


def windows(selection: SlidingWindow, clients: int, rounds: int, seed: int = 0) -> list[set[int]]:
    pool = pool_of(clients)
    return [set(selection.choose(round, pool, seed).tolist()) for round in range(rounds)]


def test_twenty_clients_at_thirty_percent() -> None:
    """Windows of 6; 4 rounds a pass: 6 + 6 + 6 + (2 new + 4 from the start of the same order)."""
    for seed in range(10):
        rounds = windows(SlidingWindow(fraction=0.3), 20, 8, seed)
        assert [len(w) for w in rounds] == [6] * 8
        for start in (0, 4):
            a, b, c, d = rounds[start : start + 4]
            assert not (a & b or a & c or b & c)
            assert a | b | c | d == set(range(20))
            assert len(d - a) == 2 and len(d & a) == 4, "the last window wraps to the start of the same permutation"


@given(st.integers(1, 40), st.floats(0.01, 1), st.integers(0, 1000))
def test_everybody_takes_part_in_every_pass(clients: int, fraction: float, seed: int) -> None:
    window = max(1, math.floor(fraction * clients + 1e-9))
    pieces = math.ceil(clients / window)
    rounds = windows(SlidingWindow(fraction=fraction), clients, 2 * pieces, seed)
    for one in (rounds[:pieces], rounds[pieces:]):
        assert all(len(w) == window for w in one)
        assert set().union(*one) == set(range(clients))
        counts = np.bincount([client for w in one for client in w], minlength=clients)
        assert counts.min() == 1 and counts.max() <= 2
        assert (counts == 2).sum() == pieces * window - clients


def test_every_pass_and_every_seed_has_a_fresh_order() -> None:
    selection = SlidingWindow(fraction=0.3)
    firsts = {tuple(sorted(windows(selection, 20, 1, seed)[0])) for seed in range(30)}
    assert len(firsts) >= 29
    passes = [tuple(sorted(w)) for w in windows(selection, 20, 4 * 30)[::4]]
    assert len(set(passes)) >= 29


def test_a_window_of_everybody_is_everybody() -> None:
    assert windows(SlidingWindow(fraction=1.0), 7, 3) == [set(range(7))] * 3


def test_rounding_does_not_lose_a_client() -> None:
    """0.3 * 20 is 5.999999999999999 in binary for some products; floor must give 6 of 20, 3 of 10, 30 of 100."""
    for clients in (10, 20, 30, 70, 100, 110):
        assert len(SlidingWindow(fraction=0.3).choose(0, pool_of(clients), 0)) == clients * 3 // 10
        assert len(Uniform(fraction=0.7).choose(0, pool_of(clients), 0)) == clients * 7 // 10


def test_the_unavailable_sit_their_window_out() -> None:
    pool, full = pool_of(20, away=(0, 1, 2, 3, 4)), pool_of(20)
    for round in range(8):
        expected = [c for c in SlidingWindow().choose(round, full, 3).tolist() if c > 4]
        assert SlidingWindow().choose(round, pool, 3).tolist() == expected


def test_windows_are_a_function_of_the_round_alone() -> None:
    """A resumed run asks for round 6 without having asked for rounds 0 to 5."""
    selection = SlidingWindow()
    assert windows(selection, 20, 7)[6] == set(SlidingWindow().choose(6, pool_of(20), 0).tolist())


# --- uniform ---------------------------------------------------------------------------------------------------------


def test_uniform_counts() -> None:
    pool = pool_of(10, away=(0, 1, 2))
    assert len(Uniform(count=4).choose(0, pool, 0)) == 4
    assert Uniform(count=99).choose(0, pool, 0).tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert len(Uniform(fraction=0.5).choose(0, pool, 0)) == 5  # of all clients, not of those available
    assert len(Uniform(fraction=0.001).choose(0, pool, 0)) == 1


def test_uniform_is_uniform() -> None:
    """Each of 8 available clients in 3 of 8 rounds: chi-square over 4,000 rounds, and pairs as often as they should."""
    pool, rounds = pool_of(10, empty=(4,), away=(9,)), 4000
    together = np.zeros((10, 10))
    for round in range(rounds):
        chosen = Uniform(count=3).choose(round, pool, 1)
        together[np.ix_(chosen, chosen)] += 1
    single, expected = together.diagonal()[[0, 1, 2, 3, 5, 6, 7, 8]], rounds * 3 / 8
    # a sample without replacement varies less than independent draws, whose 99.99 % point is 29.9
    assert ((single - expected) ** 2 / expected).sum() < 29.9
    pairs = together[np.ix_([0, 1, 2, 3, 5, 6, 7, 8], [0, 1, 2, 3, 5, 6, 7, 8])][np.triu_indices(8, 1)]
    rate = 3 * 2 / (8 * 7)
    assert np.abs(pairs - rounds * rate).max() < 5 * math.sqrt(rounds * rate * (1 - rate))
    assert together[4].sum() == together[9].sum() == 0


def test_uniform_differs_by_round_and_seed() -> None:
    pool = pool_of(30)
    samples = {tuple(Uniform(count=5).choose(round, pool, seed)) for round in range(10) for seed in range(10)}
    assert len(samples) >= 99


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Uniform(), "either fraction or count: give exactly one"),
        (lambda: Uniform(fraction=0.5, count=3), "either fraction or count: give exactly one"),
        (lambda: Uniform(fraction=0), "Uniform.fraction = 0.0 is out of range: it must be > 0 and <= 1"),
        (lambda: Uniform(fraction=1.2), "Uniform.fraction = 1.2 is out of range"),
        (lambda: Uniform(count=0), "Uniform.count = 0 is out of range: it must be >= 1"),
        (lambda: Uniform(count=2.5), "Uniform.count = 2.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: SlidingWindow(fraction=0), "SlidingWindow.fraction = 0.0 is out of range"),
        (lambda: SlidingWindow(fraction=float("nan")), "SlidingWindow.fraction = nan is out of range"),
    ],
)
def test_refusals(build: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        build()
