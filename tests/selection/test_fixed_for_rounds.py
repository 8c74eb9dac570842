"""Participants that stay for several rounds."""

from __future__ import annotations

import numpy as np
import pytest

from consilience.core.exchange import Pool
from consilience.core.settings import Invalid
from consilience.selection import Everyone, SlidingWindow, Uniform
from consilience.selection.fixed_for_rounds import FixedForRounds


def pool(clients: int = 12, *, gone: tuple[int, ...] = (), empty: tuple[int, ...] = (), loss: float = np.nan) -> Pool:
    sizes, available = np.full(clients, 5), np.ones(clients, dtype=bool)
    sizes[list(empty)], available[list(gone)] = 0, False
    return Pool(sizes=sizes, losses=np.full(clients, loss), available=available)


def chosen(held: FixedForRounds, round: int, **options: object) -> list[int]:
    return held.choose(round, pool(**options), seed=4).tolist()  # type: ignore[arg-type]


def test_the_choice_changes_every_so_many_rounds_only() -> None:
    held = FixedForRounds(inner=Uniform(count=4), rounds=3)
    drawn = [chosen(held, round) for round in range(12)]
    for start in range(0, 12, 3):
        assert drawn[start] == drawn[start + 1] == drawn[start + 2]
    assert len({tuple(one) for one in drawn}) == 4
    assert drawn[3] == Uniform(count=4).choose(1, pool(), seed=4).tolist()  # the second choice


def test_one_round_at_a_time_is_the_inner_selection() -> None:
    for round in range(5):
        assert (
            chosen(FixedForRounds(inner=Uniform(count=4), rounds=1), round)
            == Uniform(count=4).choose(round, pool(), 4).tolist()
        )


def test_a_window_goes_on_by_one_for_every_choice() -> None:
    held = FixedForRounds(inner=SlidingWindow(fraction=0.25), rounds=4)
    assert sorted(client for choice in range(4) for client in chosen(held, 4 * choice)) == list(range(12))


def test_who_is_away_sits_the_round_out_and_is_not_replaced() -> None:
    held = FixedForRounds(inner=Uniform(count=4), rounds=3)
    everyone = chosen(held, 0)
    away = everyone[1]
    assert chosen(held, 1, gone=(away,)) == [client for client in everyone if client != away]
    assert chosen(held, 2) == everyone
    assert chosen(held, 2, loss=3.0) == everyone  # losses reported meanwhile change nothing


def test_clients_without_rows_are_never_chosen() -> None:
    assert chosen(FixedForRounds(inner=Everyone()), 0, empty=(2, 5)) == [0, 1, 3, 4, 6, 7, 8, 9, 10, 11]


def test_a_selection_that_asks_first_cannot_be_held() -> None:
    class Asking(Everyone):
        def queries(self, round: int, pool: Pool, seed: int) -> np.ndarray:
            return pool.candidates

    with pytest.raises(Invalid, match=r"FixedForRounds\.inner = Asking chooses by losses, which change every round"):
        FixedForRounds(inner=Asking())
    with pytest.raises(Invalid, match=r"FixedForRounds\.rounds = 0 is out of range"):
        FixedForRounds(rounds=0)
