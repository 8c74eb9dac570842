"""Noise in shares: the distribution that is drawn, what its sums cost, and what one client can move."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import chisquare

from consilience.core.settings import Invalid
from consilience.privacy import Mechanism, Spending, epsilon_of
from consilience.privacy.adaptive_bound import AdaptiveBound
from consilience.privacy.discrete_gaussian import LEAST_DEVIATION, sample
from consilience.privacy.noise_shares import NoiseShares
from consilience.privacy.round_keys import seeded

KEY = seeded(3, 1)
STEP = 2 * 8.0 / (1 << 22)


def weights(deviation: float, most: int) -> np.ndarray:
    """[2 most + 1] probabilities of -most .. most."""
    found = np.exp(-(np.arange(-most, most + 1) ** 2) / (2 * deviation**2))
    return found / found.sum()


@pytest.mark.parametrize("deviation", [0.4, 1.0, 4.0, 17.3])
def test_samples_have_the_weights_of_a_gaussian(deviation: float) -> None:
    count, most = 200_000, math.ceil(12 * deviation)
    found = np.bincount(sample(KEY, "test", count, deviation) + most, minlength=2 * most + 1)
    expected = count * weights(deviation, most)
    often = expected > 20
    rest = [found[~often].sum()], [expected[~often].sum()]
    one, other = np.append(found[often], rest[0]), np.append(expected[often], rest[1])
    assert chisquare(one, other * one.sum() / other.sum()).pvalue > 1e-4


def test_a_share_is_drawn_from_its_key_and_no_other() -> None:
    one, same, other = (sample(seeded(3, round), "test", 1000, 50.0) for round in (1, 1, 2))
    assert (one == same).all() and (one != other).mean() > 0.9
    drawn = [NoiseShares(noise=1.0, clients=5).drawn(1.0, step=STEP, values=100, needed=3) for _ in range(2)]
    assert (drawn[0] != drawn[1]).mean() > 0.9, "noise was used twice"


@pytest.mark.parametrize(("clients", "shift"), [(2, 3), (5, 8)])
def test_a_sum_of_shares_costs_no_more_than_is_counted(clients: int, shift: int) -> None:
    """The Renyi divergence of the exact sum of n discrete Gaussians from the same, shifted: a D^2 / (2 n s^2)."""
    deviation = LEAST_DEVIATION
    one = weights(deviation, 60)
    total = one
    for _ in range(clients - 1):
        total = np.convolve(total, one)
    here, there = np.pad(total, (shift, 0)), np.pad(total, (0, shift))
    inside = (here > 1e-250) & (there > 1e-250)
    rho = shift**2 / (2 * clients * deviation**2)
    for order in (1.5, 2.0, 4.0, 8.0):
        terms = order * np.log(here[inside]) + (1 - order) * np.log(there[inside])
        exact = math.log(np.exp(terms).sum()) / (order - 1)
        assert order * rho * 0.999 <= exact <= order * rho * (1 + 1e-6)


@pytest.mark.parametrize(
    ("noise", "rounds", "delta"), [(0.7, 3, 1e-5), (1.0, 1, 1e-6), (4.0, 100, 1e-5), (30.0, 7, 1e-4)]
)
def test_epsilon_is_that_of_concentrated_privacy(noise: float, rounds: int, delta: float) -> None:
    """The best conversion of Canonne, Kamath and Steinke, over all orders; never below the Gaussian's own epsilon."""
    from scipy.optimize import minimize_scalar

    rho = rounds / (2 * noise**2)

    def at(log_order: float) -> float:
        order = 1 + math.exp(log_order)
        return order * rho + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)

    best = minimize_scalar(at, bounds=(-4, 12), method="bounded", options={"xatol": 1e-10}).fun
    found = Spending(noise=noise, delta=delta, discrete=True).epsilon(rounds)
    assert best * (1 - 1e-9) <= found <= best * (1 + 1e-4)
    assert Spending(noise=noise, delta=delta).epsilon(rounds) < found
    mixed = epsilon_of({Mechanism(noise, 1.0, True): 1, Mechanism(noise, 0.1): rounds - 1}, delta)
    assert mixed == pytest.approx(found, rel=1e-9)


def test_no_contribution_is_longer_than_counted() -> None:
    draw = np.random.default_rng(0)
    for adaptive in (None, AdaptiveBound(count_noise=2.0)):
        shares = NoiseShares(noise=1.0, clients=8, adaptive=adaptive)
        for length in (0.0, 1e-30, 0.5, 1.0, 1e6, 1e200):
            update = draw.standard_normal(40)
            update *= length / np.linalg.norm(update)
            sent = shares.contribution(update, 0.7)
            assert len(sent) == 40 + (adaptive is not None)
            assert np.linalg.norm(sent) <= shares.length(0.7)
            if length in (0.5, 1.0):  # the last is clipped to 0.7
                np.testing.assert_allclose(sent[:40], update * min(1, 0.7 / length), rtol=1e-8)
    for broken in (math.nan, math.inf, -math.inf):
        assert not shares.contribution(np.array([1.0, broken]), 0.7).any()
    with pytest.raises(Invalid, match="cannot be clipped to a length of nan"):
        shares.contribution(np.ones(3), math.nan)


def test_the_count_and_the_updates_together_cost_what_is_counted() -> None:
    """Andrew et al.: z^-2 = z_updates^-2 + (2 s)^-2, with both under one noise."""
    adaptive = AdaptiveBound(count_noise=1.7)
    shares, bound = NoiseShares(noise=1.2, clients=20, adaptive=adaptive), 0.3
    deviation = STEP * shares.deviation(bound, step=STEP, values=1000, needed=11) * math.sqrt(11)
    assert deviation / bound == pytest.approx(adaptive.update_noise(1.2, 20), rel=1e-3)
    assert deviation / shares.count_scale(bound) == pytest.approx(1.7, rel=1e-3)
    assert deviation >= 1.2 * shares.length(bound)


def test_fewer_honest_nodes_mean_more_noise_from_each() -> None:
    alone, shared = (NoiseShares(noise=1.0, clients=9, colluding=f) for f in (3, 0))
    told = {"step": STEP, "values": 100}
    assert alone.deviation(1.0, needed=5, **told) == pytest.approx(shared.deviation(1.0, needed=2, **told))
    with pytest.raises(Invalid, match="hides nothing"):
        alone.deviation(1.0, needed=3, **told)
    with pytest.raises(Invalid, match=r"deploy\.secure_levels"):
        shared.deviation(1.0, needed=5, step=2.0, values=1)
