"""Every client by its own coin."""

from __future__ import annotations

import numpy as np
import pytest

from consilience.core.exchange import Pool
from consilience.core.settings import Invalid
from consilience.selection import Poisson


def pool(clients: int, available: np.ndarray | None = None) -> Pool:
    free = np.ones(clients, dtype=bool) if available is None else available
    return Pool(sizes=np.ones(clients, dtype=np.int64), losses=np.full(clients, np.nan), available=free)


def chosen(rate: float, rounds: int, clients: int) -> np.ndarray:
    rows = np.zeros((rounds, clients), dtype=bool)
    for round in range(rounds):
        rows[round, Poisson(rate=rate).choose(round, pool(clients), 7)] = True
    return rows


def test_each_with_its_probability_and_independently() -> None:
    rows = chosen(0.3, 4000, 5)
    deviation = np.sqrt(0.3 * 0.7 / 4000)
    assert np.all(np.abs(rows.mean(0) - 0.3) < 4.5 * deviation)
    pairs = np.corrcoef(rows.T) - np.eye(5)
    assert np.abs(pairs).max() < 4.5 / np.sqrt(4000)
    assert rows.sum(1).var() == pytest.approx(5 * 0.3 * 0.7, rel=0.1), "the number varies, as of independent coins"
    assert (rows.sum(1) == 0).any()


def test_all_or_hardly_any() -> None:
    assert chosen(1.0, 10, 6).all() and not chosen(1e-9, 50, 6).any()


def test_who_is_away_changes_nobody_elses_coin() -> None:
    away = np.ones(8, dtype=bool)
    away[[1, 4]] = False
    for round in range(20):
        everyone = Poisson(rate=0.5).choose(round, pool(8), 0)
        assert Poisson(rate=0.5).choose(round, pool(8, away), 0).tolist() == [k for k in everyone if away[k]]


@pytest.mark.parametrize("rate", [0.0, 1.5, -0.1])
def test_what_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(Invalid, match="rate"):
        Poisson(rate=rate)
