"""Power of choice: candidates by data share, then the worst of them."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

from consilience.algorithms.fedavg import fedavg
from consilience.core.exchange import Pool
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.selection import PowerOfChoice


def pool(sizes: list[int], losses: list[float], away: tuple[int, ...] = ()) -> Pool:
    available = ~np.isin(np.arange(len(sizes)), away)
    return Pool(sizes=np.array(sizes), losses=np.array(losses), available=available)


def test_the_largest_losses_of_the_candidates() -> None:
    everyone = PowerOfChoice(count=2, candidates=5)
    losses = [1.0, 5.0, 3.0, 4.0, 2.0]
    assert everyone.choose(0, pool([1] * 5, losses), 0).tolist() == [1, 3]
    assert everyone.choose(0, pool([1] * 5, losses, away=(1,)), 0).tolist() == [2, 3]
    assert everyone.choose(0, pool([1, 0, 1, 1, 1], losses), 0).tolist() == [2, 3]
    few = PowerOfChoice(count=1, candidates=3)
    for round in range(50):
        drawn = few.queries(round, pool([1] * 5, losses), 7)
        assert len(drawn) == 3 and (np.diff(drawn) > 0).all()
        assert few.choose(round, pool([1] * 5, losses), 7).tolist() == [max(drawn, key=lambda k: losses[k])]


def test_candidates_are_drawn_by_their_rows() -> None:
    """One candidate of shares 1/10, 2/10, 7/10: how often each is drawn in 4000 rounds."""
    one = PowerOfChoice(count=1, candidates=1)
    counts = np.zeros(3)
    for round in range(4000):
        counts[one.choose(round, pool([10, 20, 70], [9.0, 5.0, 1.0]), 0)] += 1
    np.testing.assert_allclose(counts / 4000, [0.1, 0.2, 0.7], atol=0.025)


def test_as_many_candidates_as_chosen_is_sampling_by_rows() -> None:
    plain = PowerOfChoice(count=2, candidates=2)
    for round in range(20):
        here = pool([3, 1, 4, 1, 5], [1.0, 2.0, 3.0, 4.0, 5.0])
        assert plain.choose(round, here, 1).tolist() == plain.queries(round, here, 1).tolist()


def test_unknown_losses_count_as_the_worst_and_nobody_is_asked_twice_without_need() -> None:
    lazy = PowerOfChoice(count=1, candidates=3, fresh_losses=False)
    here = pool([1, 1, 1], [3.0, np.nan, 9.0])
    assert lazy.queries(0, here, 0).tolist() == [] and lazy.choose(0, here, 0).tolist() == [1]


def test_sizes_of_the_choice() -> None:
    assert len(PowerOfChoice(fraction=0.4).queries(0, pool([1] * 10, [1.0] * 10), 0)) == 8
    assert len(PowerOfChoice(fraction=0.4).choose(0, pool([1] * 10, [1.0] * 10), 0)) == 4
    assert PowerOfChoice(count=2).choose(0, pool([1, 1], [1.0, 1.0], away=(0, 1)), 0).tolist() == []
    assert PowerOfChoice(count=5, candidates=9).choose(0, pool([1, 1], [1.0, 1.0]), 0).tolist() == [0, 1]
    with pytest.raises(Invalid, match="candidates = 2 must be at least count = 3"):
        PowerOfChoice(count=3, candidates=2)
    with pytest.raises(Invalid, match="exactly one of them"):
        PowerOfChoice()


def test_a_run_asks_the_candidates_for_fresh_losses() -> None:
    selection = PowerOfChoice(count=2, candidates=4)
    rounds = list(run(fedavg(batch_size=4, selection=selection), tiny.engine(), rounds=3, seed=2))
    model, state = tiny.engine().start(), 8 * 323
    for number, one in enumerate(rounds):
        drawn = selection.queries(number, pool(list(tiny.SIZES), [0.0] * 5), 2)
        data = tiny.federation()
        losses = {}
        for k in drawn.tolist():
            x, y = data.train.of(k)
            hidden = (x.flatten(1) @ model["params"]["1.weight"].T + model["params"]["1.bias"]).tanh()
            output = hidden @ model["params"]["3.weight"].T + model["params"]["3.bias"]
            losses[k] = float(-output.log_softmax(1)[range(len(y)), y].mean())
        assert one.chosen.tolist() == sorted(sorted(losses, key=lambda k: -losses[k])[:2])
        assert one.bytes_down == state * (4 + 2)
        model = one.model
