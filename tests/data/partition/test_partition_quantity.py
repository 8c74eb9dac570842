"""Quantity skew: the shapes of the sizes, and the rounding underneath."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.settings import Invalid
from consilience.data.partition import Quantity
from consilience.data.partition.apportion import apportion

LABELS = np.arange(100_000) % 10


def sizes_of(**options):
    return np.array([len(p) for p in Quantity(**options).split(LABELS, groups=None, seed=0)])


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_power_law_sizes_fall_with_rank_by_the_exponent(exponent):
    sizes = np.sort(sizes_of(clients=50, kind="power_law", exponent=exponent))[::-1]
    slope = np.polyfit(np.log(np.arange(1, 51)), np.log(sizes), 1)[0]
    assert slope == pytest.approx(-exponent, abs=0.01)
    weights = np.arange(1, 51.0) ** -exponent
    assert np.abs(sizes - 100_000 * weights / weights.sum()).max() <= 1


def test_power_law_gives_the_ranks_to_drawn_clients():
    assert not np.array_equal(np.argsort(-sizes_of(clients=50)), np.arange(50))


def test_log_normal_sizes_have_normal_logarithms():
    logs = np.log(sizes_of(clients=2000, kind="log_normal", sigma=0.5, min_size=0))
    assert logs.std() == pytest.approx(0.5, rel=0.06)
    assert abs(((logs - logs.mean()) ** 3).mean() / logs.std() ** 3) < 0.25  # symmetric
    assert (sizes_of(clients=8, kind="log_normal", sigma=0.0) == 12_500).all()


def test_half_normal_sizes_have_its_spread():
    sizes = sizes_of(clients=2000, kind="half_normal", min_size=0)
    # |z| has mean sqrt(2/pi) and variance 1 - 2/pi.
    assert sizes.std() / sizes.mean() == pytest.approx(np.sqrt((1 - 2 / np.pi) / (2 / np.pi)), rel=0.06)
    assert np.mean(sizes < 0.6745 * sizes.mean() * np.sqrt(np.pi / 2)) == pytest.approx(0.5, abs=0.04)  # median


def test_rows_are_alike():
    parts = Quantity(clients=5, kind="power_law").split(LABELS, groups=None, seed=0)
    for part in parts:
        share = np.bincount(LABELS[part], minlength=10) / len(part)
        assert np.abs(share - 0.1).max() < 5 * np.sqrt(0.09 / len(part))


def test_explicit_sizes_are_kept_and_must_fit():
    labels = np.arange(10)
    parts = Quantity(clients=3, kind="sizes", sizes=(1, 0, 9)).split(labels, groups=None, seed=0)
    assert [len(p) for p in parts] == [1, 0, 9]
    partial = Quantity(clients=2, kind="sizes", sizes=(3, 4), allow_rest=True)
    parts = partial.split(labels, groups=None, seed=0)
    assert [len(p) for p in parts] == [3, 4] and len(np.unique(np.concatenate(parts))) == 7
    with pytest.raises(Invalid, match=r"ask for 7 rows, but there are 10: .*or set allow_rest"):
        Quantity(clients=2, kind="sizes", sizes=(3, 4)).split(labels, groups=None, seed=0)
    with pytest.raises(Invalid, match="ask for 11 rows, but there are 10"):
        Quantity(clients=2, kind="sizes", sizes=(5, 6), allow_rest=True).split(labels, groups=None, seed=0)


@pytest.mark.parametrize(
    ("bad", "key"),
    [
        ({"kind": "sizes"}, "Quantity.sizes"),
        ({"sizes": (1, 2)}, "Quantity.sizes"),
        ({"kind": "sizes", "sizes": (1, 2, 3)}, "Quantity.sizes has 3 values for clients = 2"),
        ({"kind": "sizes", "sizes": (1, -2)}, r"Quantity.sizes\[1\] = -2"),
        ({"kind": "zipf"}, "Quantity.kind"),
        ({"sigma": -1.0}, "Quantity.sigma"),
        ({"allow_rest": True}, "Quantity.allow_rest"),
    ],
)
def test_bad_settings_name_the_key(bad, key):
    with pytest.raises(Invalid, match=key):
        Quantity(**{"clients": 2, **bad})


def test_everyone_has_a_row_unless_asked_otherwise():
    assert sizes_of(clients=1000, kind="power_law", exponent=3.0).min() == 1
    assert sizes_of(clients=1000, kind="power_law", exponent=3.0, min_size=20).min() == 20
    with pytest.raises(Invalid, match="at most 0, or at most 3 clients"):
        Quantity(clients=5).split(np.arange(3), groups=None, seed=0)
    assert sum(len(p) for p in Quantity(clients=5, min_size=0).split(np.arange(3), groups=None, seed=0)) == 3


def test_apportion_by_hand():
    assert apportion(10, [1, 1, 1]).tolist() == [4, 3, 3]
    assert apportion(7, [5, 3, 2]).tolist() == [4, 2, 1]  # 3.5, 2.1, 1.4: the half goes up
    assert apportion(10, [8, 1, 1], most=[5, 9, 9]).tolist() == [5, 3, 2]
    assert apportion(10, [98, 1, 1], least=2).tolist() == [6, 2, 2]
    assert apportion(4, [0, 0]).tolist() == [2, 2]
    assert apportion(3, [0, 1]).tolist() == [0, 3]


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=30),
    total=st.integers(0, 10_000),
    data=st.data(),
)
def test_apportion_adds_up_within_its_limits_and_rounds_by_less_than_one(weights, total, data):
    share, count = total // len(weights), len(weights)
    least = data.draw(st.lists(st.integers(0, share), min_size=count, max_size=count))
    most = data.draw(st.lists(st.integers(share + 1, 2 * total + 1), min_size=count, max_size=count))
    result = apportion(total, weights, least=least, most=most)
    assert result.sum() == total and (result >= least).all() and (result <= most).all()
    if sum(weights) > 1e-3 * max(weights) and min(weights) > 1e-6 * max(weights):
        free = apportion(total, weights)
        exact = total * np.array(weights) / sum(weights)
        assert (np.abs(free - exact) < 1 + 1e-6).all()
