"""Dirichlet label skew against its distribution, and its limits."""

import re

import numpy as np
import pytest

from consilience.core.settings import Invalid
from consilience.data.partition import Dirichlet
from consilience.data.partition.dirichlet import log_gamma


def label_counts(parts, labels, classes):
    return np.array([np.bincount(labels[p], minlength=classes) for p in parts])  # [clients, classes]


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_shares_have_the_mean_and_variance_of_the_distribution(alpha):
    classes, each, clients = 500, 200, 5
    labels = np.repeat(np.arange(classes), each)
    parts = Dirichlet(clients=clients, alpha=alpha).split(labels, groups=None, seed=3)
    shares = label_counts(parts, labels, classes) / each
    mean, variance = 1 / clients, (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    # Cutting at whole rows adds at most one row (1 / each) to any share.
    assert np.abs(shares.mean(1) - mean).max() < 4.5 * np.sqrt(variance / classes) + 1 / each
    spread = shares.var(1).mean()
    assert spread == pytest.approx(variance, rel=0.12)


@pytest.mark.parametrize("alpha", [0.02, 0.7, 1.0, 30.0])
def test_normalised_draws_have_beta_marginals(alpha):
    stats = pytest.importorskip("scipy.stats")
    weights = log_gamma(alpha, (4000, 4), np.random.default_rng(0))
    shares = np.exp(weights - weights.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    # At chosen points, not by Kolmogorov and Smirnov: small alpha has atoms at 0 and 1 in floating point.
    for point in (1e-30, 1e-4, 0.01, 0.1, 0.25, 0.5, 0.9, 0.999):
        expected = stats.beta.cdf(point, alpha, 3 * alpha)
        assert np.mean(shares[:, 0] <= point) == pytest.approx(
            expected, abs=4 * np.sqrt(expected * (1 - expected) / 4000) + 1e-9
        )


@pytest.mark.parametrize("alpha", [0.0005, 1e-8, 1e-300, 1e12])
@pytest.mark.parametrize("balance", [False, True])
def test_extreme_alpha_stays_finite(alpha, balance):
    labels = np.repeat(np.arange(120), 137)
    with np.errstate(all="raise", under="ignore"):
        parts = Dirichlet(clients=5, alpha=alpha, balance=balance).split(labels, groups=None, seed=0)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    largest = label_counts(parts, labels, 120).max(0) / 137
    if alpha < 1:
        assert np.mean(largest > 0.99) > 0.95  # each class with one client
    elif not balance:  # which sends the last classes to the clients with room
        assert largest.max() < 0.22


def test_small_alpha_picks_owners_evenly():
    labels = np.repeat(np.arange(2000), 2)
    parts = Dirichlet(clients=4, alpha=0.0005).split(labels, groups=None, seed=1)
    owned = label_counts(parts, labels, 2000).argmax(0)
    assert np.abs(np.bincount(owned, minlength=4) - 500).max() < 4 * np.sqrt(2000 * 0.25 * 0.75)


def test_balance_gives_nothing_to_a_client_that_holds_the_mean():
    labels = np.repeat(np.arange(50), 40)
    mean = 2000 / 8
    for seed in range(20):
        parts = Dirichlet(clients=8, alpha=0.1, balance=True).split(labels, groups=None, seed=seed)
        counts = label_counts(parts, labels, 50)
        before = np.cumsum(counts, axis=1) - counts  # held when each class was dealt
        assert (counts[before >= mean] == 0).all()
    plain = [len(p) for p in Dirichlet(clients=8, alpha=0.1).split(labels, groups=None, seed=0)]
    assert max(plain) > mean + 40  # without it, skew in size is larger than balance allows


def test_rows_within_a_class_are_drawn_not_taken_in_order():
    labels = np.zeros(1000, int)
    first, _ = Dirichlet(clients=2, alpha=100.0).split(labels, groups=None, seed=0)
    assert abs(first.mean() - 500) < 60 and not np.array_equal(first, np.arange(len(first)))


def test_min_size_is_reached_and_the_unreachable_is_refused_with_what_works():
    labels = np.arange(2000) % 10
    for seed in range(5):
        parts = Dirichlet(clients=10, alpha=0.3, min_size=30).split(labels, groups=None, seed=seed)
        assert min(len(p) for p in parts) >= 30
    with pytest.raises(Invalid) as refusal:
        Dirichlet(clients=40, alpha=0.01, min_size=20).split(labels, groups=None, seed=0)
    text = str(refusal.value)
    found = re.search(r"min_size <= (\d+), or alpha = ([\d.]+), or clients = (\d+)", text)
    assert found and "Dirichlet.min_size = 20" in text and "1000 draws" in text
    best, alpha, clients = int(found[1]), float(found[2]), int(found[3])
    for works in (
        Dirichlet(clients=40, alpha=0.01, min_size=best),
        Dirichlet(clients=40, alpha=alpha, min_size=20),
        Dirichlet(clients=clients, alpha=0.01, min_size=20),
    ):
        works.split(labels, groups=None, seed=0)


def test_more_than_all_rows_is_refused_at_once():
    with pytest.raises(Invalid, match=r"min_size = 6 for 2 clients needs 12 rows, but there are 10: at most 5"):
        Dirichlet(clients=2, alpha=1.0, min_size=6).split(np.zeros(10, int), groups=None, seed=0)


@pytest.mark.parametrize("bad", [{"alpha": 0.0}, {"alpha": float("nan")}, {"clients": 0}, {"min_size": -1}])
def test_settings_out_of_range_name_the_key(bad):
    with pytest.raises(Invalid, match=f"Dirichlet.{next(iter(bad))}"):
        Dirichlet(**{"clients": 2, "alpha": 1.0, **bad})
