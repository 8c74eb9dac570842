"""Epsilon against a closed form, against another way to ask the same library, and against published numbers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import log_ndtr

from consilience.core.settings import Invalid
from consilience.privacy import Spending, epsilon_of, history, noise_for

dp_accounting = pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")


def gaussian_epsilon(noise: float, delta: float) -> float:
    """Balle and Wang 2018: the least epsilon of one Gaussian mechanism of sensitivity 1, exactly."""

    def log_delta(epsilon: float) -> float:
        above = log_ndtr(0.5 / noise - epsilon * noise)
        below = epsilon + log_ndtr(-0.5 / noise - epsilon * noise)
        return above + math.log1p(-math.exp(below - above)) if below < above else -math.inf

    return brentq(lambda epsilon: log_delta(epsilon) - math.log(delta), 1e-9, 1e4)


DOCS = Path(__file__).parents[2] / "docs"
GRID = list(itertools.product((0.7, 1.0, 2.0, 5.0, 20.0), (1, 3, 10, 30, 100), (1e-3, 1e-5, 1e-7)))


@pytest.mark.parametrize(("noise", "rounds", "delta"), GRID)
def test_without_sampling_rounds_are_one_gaussian(noise: float, rounds: int, delta: float) -> None:
    """T rounds of noise s are one of noise s / sqrt(T): never below the truth, and at most a per cent above."""
    exact = gaussian_epsilon(noise / math.sqrt(rounds), delta)
    found = Spending(noise=noise, delta=delta).epsilon(rounds)
    assert exact * (1 - 1e-9) <= found <= exact * 1.01 + 1e-3


# the less noise, the wider are the distributions that the library composes: seconds each
SAMPLED = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 30))]


@pytest.mark.parametrize("seed", SAMPLED)
def test_with_sampling_it_is_the_reference_accountants(seed: int) -> None:
    draw = np.random.default_rng(seed)
    noise, rate = float(draw.uniform(0.6, 3)), float(draw.uniform(0.005, 0.9))
    rounds, delta = int(draw.integers(1, 200)), float(10.0 ** -draw.uniform(3, 7))
    accountant = dp_accounting.pld.PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, rounds)
    found, wanted = Spending(noise=noise, rate=rate, delta=delta).epsilon(rounds), accountant.get_epsilon(delta)
    assert wanted * (1 - 1e-6) <= found <= wanted * 1.01 + 1e-6


OTHER_NOISE = [*(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6)), *range(6, 10)]


@pytest.mark.parametrize("seed", OTHER_NOISE)
def test_rounds_of_different_noise_are_one_gaussian_without_sampling(seed: int) -> None:
    """Rounds of noise s_1, s_2, ... are one of noise (sum 1 / s_i^2)^(-1/2)."""
    draw = np.random.default_rng(seed)
    noises = [float(noise) for noise in np.round(draw.uniform(0.7, 8, draw.integers(2, 9)), 2)]
    exact = gaussian_epsilon(sum(noise**-2 for noise in noises) ** -0.5, 1e-5)
    found = epsilon_of(history((noise, 1.0) for noise in noises), 1e-5)
    assert exact * (1 - 1e-9) <= found <= exact * 1.01 + 1e-3


OTHER_NOISE_AND_RATE = [
    (9, 2.8),
    *(pytest.param(seed, 2.0, marks=pytest.mark.slow) for seed in (2, 3)),
    *(pytest.param(seed, 0.6, marks=pytest.mark.slow) for seed in range(7)),
]


@pytest.mark.parametrize(("seed", "least_noise"), OTHER_NOISE_AND_RATE)
def test_rounds_of_different_noise_and_rate_are_the_reference_accountants(seed: int, least_noise: float) -> None:
    draw, accountant, rounds = np.random.default_rng(seed), dp_accounting.pld.PLDAccountant(), []
    for _ in range(int(draw.integers(2, 5))):
        noise, rate = float(draw.uniform(least_noise, 3)), float(draw.uniform(0.01, 1))
        count = int(draw.integers(1, 20))
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), count)
        rounds += [(noise, rate)] * count
    found, wanted = epsilon_of(history(rounds), 1e-5), accountant.get_epsilon(1e-5)
    assert wanted * (1 - 1e-6) <= found <= wanted * 1.01 + 1e-6
    draw.shuffle(rounds)
    assert epsilon_of(history(rounds), 1e-5) == found, "their order has no effect"


def test_the_pages_count_these_settings() -> None:
    privacy, faults = ((DOCS / name).read_text(encoding="utf-8") for name in ("privacy.md", "faults.md"))
    closed, sampled = len(GRID) + len(OTHER_NOISE), len(SAMPLED) + len(OTHER_NOISE_AND_RATE)
    assert f"in {closed} settings, ten of them with different rounds" in privacy and len(OTHER_NOISE) == 10
    assert f"in {sampled} random settings, ten of them with different rounds" in privacy
    assert len(OTHER_NOISE_AND_RATE) == 10
    assert f"in {closed + sampled} settings, not 200" in faults


def test_nothing_makes_what_was_spent_less() -> None:
    past, before = history([(3.0, 1.0)] * 2), Spending(noise=3.0).epsilon(2)
    assert before == epsilon_of(past, 1e-5) > 1.8
    later = [Spending(noise=50.0, rate=0.01).epsilon(rounds, after=past) for rounds in (0, 1, 2)]
    assert later[0] == before and before <= later[1] <= later[2]
    assert Spending(noise=50.0).rounds_within(before - 0.1, after=past) == 0
    assert epsilon_of(past, 1e-7) > before, "a smaller delta is asked of the same rounds"
    with pytest.raises(Invalid, match="out of reach"):
        noise_for(1.0, rounds=1, after=past)


def test_a_published_setting() -> None:
    assert Spending(noise=1.0, rate=0.01, delta=1e-5).epsilon(1000) == pytest.approx(1.828, rel=2e-3)


def test_it_grows_with_rounds_and_rate_and_shrinks_with_noise() -> None:
    costs = [Spending(noise=4.0, rate=0.2).epsilon(rounds) for rounds in (0, 1, 2, 5, 20)]
    assert costs[0] == 0 and sorted(costs) == costs and len(set(costs)) == 5
    assert Spending(noise=4.0, rate=0.1).epsilon(5) < Spending(noise=4.0, rate=0.2).epsilon(5)
    assert Spending(noise=8.0, rate=0.2).epsilon(5) < Spending(noise=4.0, rate=0.2).epsilon(5)


@pytest.mark.parametrize("budget", [0.05, 0.3, 0.8])
def test_as_many_rounds_as_fit_and_no_more(budget: float) -> None:
    spending = Spending(noise=5.0, rate=0.3)
    rounds = spending.rounds_within(budget)
    assert (rounds == 0 or spending.epsilon(rounds) <= budget) and spending.epsilon(rounds + 1) > budget


def test_a_budget_of_exactly_so_many_rounds_holds_just_these() -> None:
    spending = Spending(noise=5.0)
    for rounds in (*range(1, 9), 11, 13):
        assert spending.rounds_within(spending.epsilon(rounds)) == rounds


def test_as_little_noise_as_will_do() -> None:
    noise = noise_for(0.3, rounds=2, rate=0.25)
    assert Spending(noise=noise, rate=0.25).epsilon(2) <= 0.3 < Spending(noise=0.998 * noise, rate=0.25).epsilon(2)


def test_a_delta_of_one_promises_nothing() -> None:
    with pytest.raises(Invalid, match=r"delta = 1\.0 must be below 1"):
        Spending(noise=1.0, delta=1.0)
