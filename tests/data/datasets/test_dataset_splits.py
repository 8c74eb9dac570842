"""FixedForRounds-out rows: true splits, fair to groups and labels, and functions of the seed alone."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from consilience.data.datasets.prepare.splits import at_most, given_or_held_out, held_out

rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=120)


@given(rows=rows, fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**40))
def test_every_group_and_label_gives_its_share(rows, fraction, seed):
    labels, groups = np.array(rows).T
    train, test = held_out(labels, fraction=fraction, seed=seed, groups=groups)
    assert sorted([*train, *test]) == list(range(len(rows)))
    for group in np.unique(groups):
        size, held = (groups == group).sum(), (groups[test] == group).sum()
        assert held in {min(math.floor(size * fraction), size - 1), min(math.ceil(size * fraction), size - 1)}
        for label in range(5):
            share = ((groups == group) & (labels == label)).sum() * held / size
            assert abs(((groups[test] == group) & (labels[test] == label)).sum() - share) < 1 + 1e-9


def test_small_groups_give_their_share_together():
    groups = np.repeat(np.arange(100), 2)  # 0.4 rows each
    test = held_out(np.zeros(200), fraction=0.2, seed=0, groups=groups)[1]
    assert len(test) == 40 and np.bincount(groups[test]).max() == 1
    groups = np.append(np.arange(100), np.full(50, 100))  # many that can give nothing, and one that can
    test = held_out(np.zeros(150), fraction=0.2, seed=0, groups=groups)[1]
    assert len(test) == 10 and set(groups[test]) == {100}


def test_a_group_of_one_keeps_its_row():
    train, test = held_out(np.zeros(1), fraction=0.9, seed=0)
    assert train.tolist() == [0] and len(test) == 0


def test_the_draw_depends_on_the_seed_only():
    labels = np.arange(100) % 3
    first = held_out(labels, fraction=0.3, seed=5)[1]
    np.random.seed(0)
    assert np.array_equal(first, held_out(labels, fraction=0.3, seed=5)[1])
    assert not np.array_equal(first, held_out(labels, fraction=0.3, seed=6)[1])


def test_every_row_can_be_chosen():
    chosen = np.zeros(20)
    for seed in range(200):
        chosen[held_out(np.zeros(20), fraction=0.25, seed=seed)[1]] += 1
    assert chosen.sum() == 200 * 5 and chosen.min() > 25 and chosen.max() < 80  # 50 each on average


def test_given_rows_are_not_drawn():
    train, test = given_or_held_out(np.zeros(5), given=3, fraction=0.5, seed=0)
    assert train.tolist() == [0, 1, 2] and test.tolist() == [3, 4]


@given(size=st.integers(1, 200), most=st.integers(1, 200))
def test_at_most_keeps_exactly_that_many(size, most):
    labels = np.arange(size) % 4
    kept = at_most(labels, most, seed=1)
    assert len(kept) == min(size, most) and len(set(kept.tolist())) == len(kept)
    assert np.ptp(np.bincount(labels[kept], minlength=min(4, size))) <= 3 or size < 8
