"""Selection by presence and speed."""

from __future__ import annotations

import numpy as np
import pytest
from scripted import Script

from consilience.algorithms.fedavg import fedavg
from consilience.core.exchange import Pool
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.selection import ByAvailability


def pool(**known: list[float]) -> Pool:
    found = {key: np.array(value) for key, value in known.items()}
    return Pool(sizes=np.ones(3, dtype=np.int64), losses=np.zeros(3), available=np.ones(3, dtype=bool), **found)


@pytest.mark.parametrize(("prefer", "expected"), [("rare", [1 / 7, 2 / 7, 4 / 7]), ("common", [4 / 7, 2 / 7, 1 / 7])])
def test_shares_of_the_first_choice(prefer: str, expected: list[float]) -> None:
    """Presence 1, 1/2, 1/4: the rates 1, 2, 4 or 4, 2, 1 sum to seven."""
    selection, counts = ByAvailability(count=1, prefer=prefer), np.zeros(3)  # type: ignore[arg-type]
    for round in range(4000):
        counts[selection.choose(round, pool(presence=[1, 0.5, 0.25]), 3)] += 1
    np.testing.assert_allclose(counts / 4000, expected, atol=0.025)


def test_rare_evens_out_who_takes_part() -> None:
    """Of four clients two are always there, two every other round: two slots are shared more evenly than by lot."""
    here, spread = np.random.default_rng(0), {}
    for prefer in ("rare", "common"):
        counts, present = np.zeros(4), np.zeros(4)
        for round in range(1, 801):
            available = np.array([True, True, *(here.random(2) < 0.5)])
            present += available
            known = Pool(
                sizes=np.ones(4, dtype=np.int64),
                losses=np.zeros(4),
                available=available,
                presence=present / round,
            )
            counts[ByAvailability(count=2, prefer=prefer).choose(round, known, 0)] += 1  # type: ignore[arg-type]
        spread[prefer] = counts.std()
    assert spread["rare"] < 0.5 * spread["common"]


def test_the_fastest_after_everyone_has_been_tried() -> None:
    fast = ByAvailability(count=1, prefer="fast")
    assert fast.choose(0, pool(seconds=[3, 1, 2]), 0).tolist() == [1]
    assert fast.choose(0, pool(seconds=[3, 1, np.nan]), 0).tolist() == [2]
    rounds = list(run(fedavg(selection=fast), Script([3, 1, 2], [1, 1, 1]), rounds=6, seed=0))
    assert sorted(one.chosen.item() for one in rounds[:3]) == [0, 1, 2]
    assert [one.chosen.tolist() for one in rounds[3:]] == [[1], [1], [1]]


def test_without_knowledge_it_is_a_lottery() -> None:
    for prefer in ("rare", "common", "fast"):
        selection = ByAvailability(count=1, prefer=prefer)  # type: ignore[arg-type]
        drawn = {int(selection.choose(round, pool(), 1).item()) for round in range(30)}
        assert drawn == {0, 1, 2}
    assert len(ByAvailability(fraction=0.7).choose(0, pool(), 0)) == 2
    with pytest.raises(Invalid, match="exactly one of them"):
        ByAvailability(count=1, fraction=0.5)
