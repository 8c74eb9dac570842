"""The bound that adapts: the paper's formulas, worked out by hand and against dp-accounting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from consilience.core.exchange import Cohort
from consilience.core.settings import Invalid
from consilience.privacy import Mechanism, Spending, epsilon_of, epsilon_so_far
from consilience.privacy.adaptive_bound import AdaptiveBound
from consilience.server.rules import private_averaging
from consilience.server.rules.private_averaging import PrivateAveraging

KEY = bytes(range(32))


def cohort(lengths: list[float], size: int = 1, round: int = 0) -> Cohort:
    """Clients whose updates from zero have these lengths."""
    stacked = torch.zeros(len(lengths), size, dtype=torch.float64)
    stacked[:, 0] = torch.tensor(lengths, dtype=torch.float64)
    ids = np.arange(len(lengths))
    reply = {"model": {"params": {"w": stacked}, "buffers": {}}} if lengths else {}
    return Cohort(reply=reply, ids=ids, examples=torch.ones(len(ids)), steps=ids + 1, round=round, secret=KEY)


def zeros(size: int = 1) -> dict[str, dict[str, torch.Tensor]]:
    return {"params": {"w": torch.zeros(size, dtype=torch.float64)}, "buffers": {}}


def test_the_noise_on_updates_is_that_of_theorem_1() -> None:
    """Andrew et al.: z_updates = (z^-2 - (2 s)^-2)^-1/2; for 100 clients s = 5, and for z = 1 that is 1.0050."""
    adaptive = AdaptiveBound()
    assert adaptive.deviation(100) == 5.0
    assert adaptive.update_noise(1.0, 100) == pytest.approx((1 - 1 / 100) ** -0.5, rel=1e-15)
    assert AdaptiveBound(count_noise=2.0).update_noise(3.0, 100) == pytest.approx((1 / 9 - 1 / 16) ** -0.5)
    with pytest.raises(Invalid, match=r"count_noise above 1\.5"):
        AdaptiveBound(count_noise=1.5).update_noise(3.0, 100)


def test_both_noises_together_cost_what_is_counted() -> None:
    """The count moves by 1/2 with noise s, the updates by a bound: two Gaussian mechanisms by dp-accounting."""
    pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")
    adaptive = AdaptiveBound(count_noise=2.0)
    two = {Mechanism(adaptive.update_noise(1.5, 40), 1.0): 1, Mechanism(2 * 2.0, 1.0): 1}
    assert epsilon_of(two, 1e-5) == pytest.approx(Spending(noise=1.5).epsilon(1), rel=2e-3)


def test_the_bound_moves_by_the_share_that_was_not_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_averaging, "normals", lambda key, purpose, count: np.zeros(count))
    rule = PrivateAveraging(bound=1.0, noise=0.5, adaptive=AdaptiveBound(quantile=0.5, lr=0.2, count_noise=1.0))
    state, notes = rule.update(rule.init(zeros(), 4), cohort([0.5, 0.9, 1.0, 3.0]))  # three of four are within
    assert notes["bound"] == 1.0
    assert float(state["bound"]) == pytest.approx(math.exp(-0.2 * (0.75 - 0.5)), rel=1e-14)
    assert float(rule.model(state)["params"]["w"]) == pytest.approx((0.5 + 0.9 + 1.0 + 1.0) / 4)
    state = {**state, "model": zeros()}
    after, _ = rule.update(state, cohort([0.97], round=1))  # alone, and now too long: 1/2 - 1/2 / 4 of four
    bound = float(state["bound"])
    assert float(after["bound"]) == pytest.approx(bound * math.exp(-0.2 * (0.375 - 0.5)))
    none, _ = rule.update(state, cohort([], round=1))
    assert float(none["bound"]) == pytest.approx(bound)  # nobody says anything about it


def test_it_finds_the_median() -> None:
    """Lengths from 1 to 100: from a bound of 0.1, noise included, to about 50."""
    rule = PrivateAveraging(bound=0.1, noise=1.0, adaptive=AdaptiveBound())
    state, lengths = rule.init(zeros(), 100), [float(n) for n in range(1, 101)]
    for round in range(120):
        state, _ = rule.update({**state, "model": zeros()}, cohort(lengths, round=round))
    assert 40 < float(state["bound"]) < 62


def test_the_noise_follows_the_bound_and_the_count_has_its_own() -> None:
    start, size = zeros(40_000), 40_000
    rule = PrivateAveraging(bound=0.3, noise=2.0, adaptive=AdaptiveBound(count_noise=2.0))
    state, _ = rule.update(rule.init(start, 10), cohort([], size))
    found = rule.model(state)["params"]["w"]
    assert float(found.std()) == pytest.approx(0.3 * (1 / 4 - 1 / 16) ** -0.5 / 10, rel=0.02)
    moves = []
    for round in range(400):
        after, _ = rule.update(rule.init(zeros(), 10), cohort([], round=round))
        moves.append(-math.log(float(after["bound"]) / 0.3) / 0.2 * 10)  # the count's noise
    assert np.std(moves) == pytest.approx(2.0, rel=0.12) and abs(np.mean(moves)) < 0.4


def test_long_histories_cost_at_most_one_per_cent_more_and_never_less() -> None:
    pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")
    from dp_accounting.pld import privacy_loss_distribution

    one = privacy_loss_distribution.from_gaussian_mechanism(standard_deviation=8.0, sampling_prob=0.5)
    for rounds in (255, 257, 1025):
        true = one.self_compose(rounds).get_epsilon_for_delta(1e-5)
        found = epsilon_so_far({Mechanism(8.0, 0.5): rounds}, 1e-5)
        assert true * (1 - 1e-9) <= found <= 1.01 * true
    counts = {epsilon_so_far({Mechanism(8.0, 0.5): rounds}, 1e-5) for rounds in range(1025, 1033)}
    assert len(counts) == 1, "eight rounds, one count"


def test_the_history_in_the_state_does_not_grow_with_the_rounds() -> None:
    rule = PrivateAveraging(noise=2.0, rate=0.5)
    state = rule.init(zeros(), 4)
    for round in range(30):
        state, _ = rule.update(state, cohort([0.5], round=round))
    assert state["spent"].tolist() == [[2.0, 0.5, 30.0]] and rule.spent_in(state) == {Mechanism(2.0, 0.5): 30}
