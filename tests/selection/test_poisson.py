"""Every client by its own coin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from consilience.core.exchange import Pool
from consilience.core.settings import Invalid
from consilience.selection import Poisson


def pool(clients: int, available: np.ndarray | None = None, secret: bytes | None = None) -> Pool:
    free = np.ones(clients, dtype=bool) if available is None else available
    sizes = np.ones(clients, dtype=np.int64)
    return Pool(sizes=sizes, losses=np.full(clients, np.nan), available=free, secret=secret)


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


@pytest.mark.parametrize("secret", [None, b"k" * 32])
def test_who_is_away_or_has_no_rows_changes_nobody_elses_coin(secret: bytes | None) -> None:
    away = np.ones(8, dtype=bool)
    away[[1, 4]] = False
    for round in range(20):
        key = None if secret is None else secret[:-1] + bytes([round])
        everyone = Poisson(rate=0.5).choose(round, pool(8, secret=key), 0)
        others = [k for k in everyone if away[k]]
        assert Poisson(rate=0.5).choose(round, pool(8, away, key), 0).tolist() == others
        without_rows = replace(pool(8, secret=key), sizes=away.astype(np.int64))
        assert Poisson(rate=0.5).choose(round, without_rows, 0).tolist() == others
        assert Poisson(rate=0.5).choose(round, pool(6, secret=key), 0).tolist() == [k for k in everyone if k < 6]


def test_with_a_key_the_seed_has_no_say() -> None:
    keyed = [Poisson(rate=0.5).choose(round, pool(64, secret=b"k" * 32), round) for round in range(5)]
    assert all(np.array_equal(one, keyed[0]) for one in keyed)
    other = Poisson(rate=0.5).choose(0, pool(64, secret=b"j" * 32), 0)
    assert not np.array_equal(other, keyed[0]) and 16 < len(other) < 48


@pytest.mark.parametrize("rate", [0.0, 1.5, -0.1])
def test_what_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(Invalid, match="rate"):
        Poisson(rate=rate)
