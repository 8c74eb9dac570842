"""Selection by loss: its probabilities, sampling without replacement, and what it asks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.algorithms.fedavg import fedavg
from consilience.core.exchange import Pool
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.selection import ByLoss, Everyone


def pool_of(losses: list[float], sizes: list[int] | None = None, away: tuple[int, ...] = ()) -> Pool:
    available = np.ones(len(losses), dtype=bool)
    available[list(away)] = False
    return Pool(
        sizes=np.array(sizes or [5] * len(losses)), losses=np.array(losses, dtype=np.float64), available=available
    )


def test_probabilities_by_hand() -> None:
    pool = pool_of([1.0, 3.0, 4.0, 9.0], sizes=[10, 2, 5, 0])  # the last one has no rows
    assert ByLoss(count=1).probabilities(pool).tolist() == pytest.approx([1 / 8, 3 / 8, 4 / 8, 0], abs=1e-15)
    assert ByLoss(count=1, proportional_to="total").probabilities(pool).tolist() == pytest.approx(
        [10 / 36, 6 / 36, 20 / 36, 0]
    )
    e = [math.exp(v / 2) for v in (1, 3, 4)]
    soft = ByLoss(count=1, proportional_to="softmax", temperature=2.0).probabilities(pool)
    assert soft.tolist() == pytest.approx([*(v / sum(e) for v in e), 0], abs=1e-15)


def ordered_chance(p: list[float], pair: set[int]) -> float:
    """The chance that two draws without replacement give this pair, drawn one after the other by p."""
    return sum(p[a] * p[b] / (1 - p[a]) for a, b in itertools.permutations(pair))


@pytest.mark.parametrize("by", ["loss", "softmax", "total"])
def test_samples_are_drawn_one_after_the_other_without_replacement(by: Any) -> None:
    pool = pool_of([0.5, 1.0, 2.0, 1.5], sizes=[4, 1, 2, 3])
    selection, times = ByLoss(count=2, proportional_to=by), 6000
    p = selection.probabilities(pool).tolist()
    counts: dict[tuple[int, ...], int] = {}
    for round in range(times):
        chosen = tuple(selection.choose(round, pool, 4).tolist())
        counts[chosen] = counts.get(chosen, 0) + 1
    for pair in itertools.combinations(range(4), 2):
        rate = ordered_chance(p, set(pair))
        assert abs(counts[pair] - times * rate) < 5 * math.sqrt(times * rate * (1 - rate)), pair


@given(st.integers(1, 25), st.integers(1, 30), st.integers(0, 99), st.sampled_from(["loss", "softmax", "total"]))
def test_choice_is_ascending_distinct_and_repeatable(clients: int, count: int, seed: int, by: Any) -> None:
    draw = np.random.default_rng([clients, count, seed])
    losses = np.where(draw.random(clients) < 0.2, np.nan, draw.exponential(size=clients) * (draw.random(clients) < 0.7))
    pool = pool_of(losses.tolist(), sizes=draw.integers(0, 4, clients).tolist())
    chosen = ByLoss(count=count, proportional_to=by).choose(3, pool, seed)
    assert chosen.tolist() == sorted(set(chosen.tolist())) and set(chosen) <= set(pool.candidates)
    assert len(chosen) == min(count, len(pool.candidates))
    assert chosen.tolist() == ByLoss(count=count, proportional_to=by).choose(3, pool, seed).tolist()


def test_counts_and_fractions_are_those_of_uniform() -> None:
    pool = pool_of([1.0] * 10, away=(0, 1))
    assert len(ByLoss(fraction=0.5).choose(0, pool, 0)) == 5
    assert len(ByLoss(fraction=0.01).choose(0, pool, 0)) == 1
    assert ByLoss(count=99).choose(0, pool, 0).tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert len({tuple(ByLoss(count=3).choose(r, pool, s)) for r in range(5) for s in range(5)}) > 15


def test_zero_losses_come_last_and_huge_ones_do_not_overflow() -> None:
    pool = pool_of([0.0, 1.0, 0.0, 2.0, 0.0])
    for round in range(20):
        assert {1, 3} <= set(ByLoss(count=3).choose(round, pool, 0).tolist())
    thirds = [ByLoss(count=3).choose(round, pool, 0).tolist() for round in range(60)]
    assert {client for chosen in thirds for client in chosen} == {0, 1, 2, 3, 4}
    assert ByLoss(count=1).probabilities(pool_of([0.0, 0.0])).tolist() == [0.5, 0.5]
    large = ByLoss(count=1, proportional_to="softmax", temperature=0.001).probabilities(pool_of([1e3, 1e3, 1e3 - 1]))
    assert large.tolist() == pytest.approx([0.5, 0.5, 0], abs=1e-12)


def test_unknown_losses() -> None:
    unknown = math.nan
    assert ByLoss(count=1).probabilities(pool_of([unknown] * 4)).tolist() == [0.25] * 4
    assert ByLoss(count=1).probabilities(pool_of([1.0, unknown, 3.0])).tolist() == pytest.approx([1 / 7, 3 / 7, 3 / 7])
    assert ByLoss(count=1).probabilities(pool_of([1.0, math.inf])).tolist() == [0.5, 0.5]


def test_a_clients_luck_depends_on_nobody_else() -> None:
    """With someone else away, whoever was among the two first still is among the two first."""
    losses = [1.0, 2.0, 0.5, 3.0, 1.0]
    for round in range(40):
        whole = set(ByLoss(count=2).choose(round, pool_of(losses), 0).tolist())
        for gone in range(5):
            rest = set(ByLoss(count=2).choose(round, pool_of(losses, away=(gone,)), 0).tolist())
            assert whole - {gone} <= rest


def test_fresh_losses_are_those_of_the_current_model_and_are_paid_for() -> None:
    """F_k(w^t) on every client's training rows, worked out here row by row."""
    engine = tiny.engine(tiny.mlp)
    seen: list[np.ndarray] = []

    class Spying(ByLoss):
        def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
            seen.append(pool.losses.copy())
            return super().choose(round, pool, seed)

    models = [engine.start()]
    rounds = []
    for one in run(fedavg(lr=0.05, batch_size=4, selection=Spying(count=2)), engine, rounds=3):
        models.append(one.model)
        rounds.append(one)
    for losses, model in zip(seen, models):
        for k in range(5):
            x, y = engine.federation.train.of(k)
            output, _ = engine.task.apply(model, x, train=False)
            assert losses[k] == pytest.approx(float(torch.nn.functional.cross_entropy(output, y)), abs=1e-12)
    plain = next(iter(run(fedavg(lr=0.05, batch_size=4, selection=Everyone()), engine, rounds=1)))
    one_model, one_reply = plain.bytes_down // 5, plain.bytes_up // 5
    assert rounds[0].bytes_down == (5 + 2) * one_model
    assert rounds[0].bytes_up == 2 * one_reply + 5 * 3 * 8  # loss, correct, rows of each


def test_old_losses_cost_nothing() -> None:
    engine = tiny.engine(tiny.mlp)
    selection = ByLoss(count=2, fresh_losses=False)
    assert len(selection.queries(0, pool_of([1.0, 2.0]), 0)) == 0
    rounds = list(run(fedavg(lr=0.05, batch_size=4, selection=selection), engine, rounds=2))
    plain = next(iter(run(fedavg(lr=0.05, batch_size=4, selection=Everyone()), engine, rounds=1)))
    assert rounds[1].bytes_down == 2 * plain.bytes_down // 5


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ByLoss(), "either fraction or count: give exactly one"),
        (lambda: ByLoss(count=1, fraction=0.5), "either fraction or count: give exactly one"),
        (
            lambda: ByLoss(count=1, proportional_to="size"),
            "ByLoss.proportional_to = 'size' is not one of loss, softmax, total",
        ),  # type: ignore[arg-type]
        (
            lambda: ByLoss(count=1, temperature=2.0),
            "temperature = 2.0 has no effect with proportional_to = 'loss'",
        ),
        (lambda: ByLoss(count=1).choose(0, pool_of([1.0, -2.0, -1.0]), 0), "that of client 1 is -2: use 'softmax'"),
    ],
)
def test_refusals(build: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        build()
