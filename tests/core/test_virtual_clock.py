"""The loop against simulated time, on schedules worked out by hand: client k adds `gains[k]` to a one-number model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from scripted import Script

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.fedbuff import fedbuff
from consilience.algorithms.simprox import simprox
from consilience.algorithms.simprox_buffered import simprox_buffered
from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.exchange import Broadcast, Pool, WaitPolicy
from consilience.core.pending import PendingReplies
from consilience.core.rng import host
from consilience.core.rounds import Diverged, Round, run
from consilience.core.settings import Invalid
from consilience.environments.environment import Environment
from consilience.selection import Everyone, Uniform
from consilience.server import UniformWeights
from consilience.server.rules.buffered import Buffered
from consilience.server.rules.staleness import PolynomialStaleness


def values(rounds: list[Round]) -> list[float]:
    return [float(one.model["params"]["w"]) for one in rounds]


def ids(rounds: list[Round]) -> list[list[int]]:
    return [one.cohort.ids.tolist() for one in rounds]


def clocks(rounds: list[Round]) -> list[float]:
    return [one.clock for one in rounds]


def plain(**options: Any) -> Algorithm:
    return fedavg(weighting=UniformWeights(), **options)


# --- synchronous rounds ----------------------------------------------------------------------------------------------


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    rounds = list(run(plain(), Script([1, 2, 5], [1, 10, 100]), rounds=3))
    assert clocks(rounds) == [5, 10, 15] and values(rounds) == pytest.approx([37, 74, 111], abs=1e-12)
    assert all(one.cohort.staleness is None for one in rounds)


def test_late_replies_are_dropped_at_the_deadline() -> None:
    script = Script([1, 2, 5], [1, 10, 100], WaitPolicy(deadline=3))
    rounds = list(run(plain(), script, rounds=2))
    assert ids(rounds) == [[0, 1]] * 2 and clocks(rounds) == [3, 6] and values(rounds) == [5.5, 11]
    assert [one.cohort.counts for one in rounds] == [{"late": 1}] * 2


def test_a_reply_at_the_deadline_is_in_time() -> None:
    (one,) = run(plain(), Script([1, 3], [1, 10], WaitPolicy(deadline=3)), rounds=1)
    assert one.cohort.ids.tolist() == [0, 1] and one.cohort.counts == {}


def test_the_first_replies_are_enough() -> None:
    script = Script([4, 2, 3, 2], [1, 10, 100, 1000], WaitPolicy(enough_replies=2))
    rounds = list(run(plain(), script, rounds=2))
    assert ids(rounds) == [[1, 3]] * 2 and clocks(rounds) == [2, 4] and values(rounds) == [505, 1010]
    assert [one.cohort.counts for one in rounds] == [{"late": 2}] * 2


def test_the_first_of_equals_are_those_with_the_lowest_numbers() -> None:
    (one,) = run(plain(), Script([1, 1, 1], [1, 10, 100], WaitPolicy(enough_replies=2)), rounds=1)
    assert one.cohort.ids.tolist() == [0, 1]


def test_nobody_in_time_is_a_round_without_a_reply() -> None:
    seen: list[Round] = []
    with pytest.raises(Diverged, match=r"\(2 late\)"):
        for one in run(plain(), Script([5, 6], [1, 10], WaitPolicy(deadline=2)), rounds=9):
            seen.append(one)
    assert clocks(seen) == [2, 4, 6] and values(seen) == [0, 0, 0]


# --- a buffer --------------------------------------------------------------------------------------------------------


def test_fedbuff_by_hand() -> None:
    """Three clients of 1, 2 and 5 seconds, a buffer of two; the comments say what is in the air."""
    rounds = list(run(fedbuff(buffer=2), Script([1, 2, 5], [1, 10, 100]), rounds=4))
    # t=1: 0 waits in the buffer; t=2: 1; both go again at 2 (until 3 and 4); 2 is still away with version 0
    # t=4: 0 and 1 again; they go at 4 (until 5 and 6). t=5: 0 with version 2, and 2 with version 0, two rounds old
    # t=6: 0 with version 3, and 1 with version 2, one round old
    assert ids(rounds) == [[0, 1], [0, 1], [0, 2], [0, 1]] and clocks(rounds) == [2, 4, 5, 6]
    third = 11 + (1 + 100 / 3**0.5) / 2
    expected = [5.5, 11, third, third + (1 + 10 / 2**0.5) / 2]
    assert values(rounds) == pytest.approx(expected, abs=1e-12)
    assert [None if one.cohort.staleness is None else one.cohort.staleness.tolist() for one in rounds] == [
        *(None, None),
        *([0, 2], [0, 1]),
    ]
    assert [one.chosen.tolist() for one in rounds] == [[0, 1, 2], [0, 1], [0, 1], [0, 2]]


def test_as_many_clients_work_as_concurrency_allows() -> None:
    """Four clients, max_concurrency 2: a client that returns is replaced at once by one that was not at work."""
    script = Script([1, 1, 1, 1], [1, 10, 100, 1000])
    rounds = list(run(fedbuff(buffer=1, concurrency=2), script, rounds=12, seed=3))
    assert all(len(one.snapshot.pending["jobs"]["ids"]) == 1 for one in rounds)  # the other one has just landed
    assert [len(one.chosen) for one in rounds] == [2, *[1] * 11]
    assert clocks(rounds)[:6] == [1, 1, 2, 2, 3, 3]
    assert len({number for one in rounds for number in one.cohort.ids.tolist()}) == 4


def test_more_clients_than_free_slots_are_drawn_from_the_seed_and_sent_in_ascending_order() -> None:
    def chosen(seed: int) -> list[int]:
        script = Script([1] * 9, [1] * 9)
        return next(run(fedbuff(buffer=4, concurrency=4), script, rounds=1, seed=seed)).chosen.tolist()

    drawn = [chosen(seed) for seed in range(12)]
    assert all(one == sorted(set(one)) and len(one) == 4 for one in drawn)
    assert len({tuple(one) for one in drawn}) > 6 and {number for one in drawn for number in one} == set(range(9))
    wanted = np.sort(host(5, "seats", 0).choice(np.arange(9), 4, replace=False)).tolist()
    assert drawn[5] == wanted, "stored runs depend on this draw"
    told: list[list[int]] = []

    class Notify(Script):
        def seconds(self, client: Any, channel: Any, broadcast: Broadcast, ids: np.ndarray, **when: int) -> np.ndarray:
            told.append(ids.tolist())
            return super().seconds(client, channel, broadcast, ids, **when)

    for seed in range(12):
        next(run(fedbuff(buffer=4, concurrency=4), Notify([1] * 9, [1] * 9), rounds=1, seed=seed))
    assert told == drawn, "server and engine are told ascending numbers, too"


def test_of_replies_at_one_instant_those_sent_out_first_come_first() -> None:
    """Clients 5 and 6 start at 0 and take 3 seconds, 0 and 1 start at 1 and take 2: all are there at 3."""
    nothing = Broadcast(shared={"model": torch.zeros(1)})
    empty = PendingReplies.of({}, 7, 0)
    pending = empty.send(np.array([5, 6]), nothing, 0, np.array([3.0, 3.0]), delay=0, limit=np.inf)
    pending = replace(pending, dispatches=1, clock=1.0)
    pending = pending.send(np.array([0, 1]), nothing, 1, np.array([2.0, 2.0]), delay=0, limit=np.inf)
    for instant in (True, False):
        left, arrived = pending.pop_arrived(3, one_instant=instant)
        assert arrived.ids.tolist() == [5, 6, 0] and left.jobs.ids.tolist() == [1] and left.clock == 3


def test_a_seat_is_free_again_while_the_buffer_fills() -> None:
    """max_concurrency 1, a buffer of two: the second client starts when the first has arrived, from the same model."""
    rounds = list(run(fedbuff(buffer=2, concurrency=1), Script([1, 1, 1], [1, 1, 1]), rounds=3, seed=0))
    assert clocks(rounds) == [2, 4, 6] and values(rounds) == [1, 2, 3]
    assert all(len(one.cohort) == 2 and one.cohort.staleness is None for one in rounds)


def test_a_deadline_frees_the_seat_of_a_slow_client() -> None:
    script = Script([1, 9], [1, 10], WaitPolicy(deadline=2))
    rounds = list(run(fedbuff(buffer=2), script, rounds=1))
    # t=1: 0 in the buffer. t=2: 1 is lost and goes again, t=4 ... until as many were lost as there are clients, and one
    assert ids(rounds) == [[0]] and rounds[0].cohort.counts == {"late": 3} and rounds[0].clock == 6


def test_what_happens_at_once_is_one_event() -> None:
    """Equal speeds and a buffer for all: the asynchronous run is the synchronous one."""
    script = Script([2, 2, 2], [1, 10, 100])
    for one, other in zip(run(fedbuff(buffer=3), script, rounds=4), run(plain(), script, rounds=4)):
        assert tiny.same(one.model, other.model) and one.clock == other.clock


def test_two_kinds_of_waiting_are_refused() -> None:
    with pytest.raises(Invalid, match="enough_replies = 2 ends a synchronous round early"):
        next(run(fedbuff(buffer=2), Script([1, 1], [1, 1], WaitPolicy(enough_replies=2)), rounds=1))
    slow = Environment(stragglers=0.5, rows_per_second=10.0)
    with pytest.raises(Invalid, match=r"use environment\.speed_spread"):
        next(run(fedbuff(buffer=2, batch_size=4), tiny.engine(environment=slow), rounds=1))


# --- certificates on real clients ------------------------------------------------------------------------------------

SLOW = Environment(latency=1.0)
PAIRS = {
    "fedbuff": (fedbuff(buffer=5, batch_size=4, lr=0.05), plain(batch_size=4, lr=0.05)),
    "fedbuff, a cohort of three": (
        fedbuff(buffer=3, concurrency=3, batch_size=4, selection=Uniform(count=3)),
        plain(batch_size=4, selection=Uniform(count=3)),
    ),
    "simprox": (simprox_buffered(buffer=5, batch_size=4), simprox(batch_size=4, selection=Everyone())),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("environment", [Environment(), SLOW], ids=["no time", "equal speeds"])
def test_equal_speeds_and_a_buffer_for_all_give_the_synchronous_run(pair: str, environment: Environment) -> None:
    asynchronous, synchronous = PAIRS[pair]
    ones = list(run(asynchronous, tiny.engine(tiny.convnet, environment=environment), rounds=3, seed=1))
    others = list(run(synchronous, tiny.engine(tiny.convnet, environment=environment), rounds=3, seed=1))
    for one, other in zip(ones, others):
        assert tiny.same(one.model, other.model) and tiny.same(one.snapshot.server, other.snapshot.server)
        assert one.cohort.ids.tolist() == other.cohort.ids.tolist() and one.clock == other.clock
        assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)


UNEVEN = Environment(rows_per_second=(9.0, 5.0, 3.0, 20.0, 1.0), jitter=0.3, latency=0.1, upload=5000.0)


def test_a_stale_reply_is_what_its_client_makes_of_the_model_it_was_sent() -> None:
    algorithm = fedbuff(buffer=2, batch_size=4, lr=0.05)
    rounds = list(run(algorithm, tiny.engine(environment=UNEVEN), rounds=8, seed=1))
    models = [tiny.engine().start(), *(one.model for one in rounds)]
    stale = 0
    for number, one in enumerate(rounds):
        ages = np.zeros(len(one.cohort), dtype=int) if one.cohort.staleness is None else one.cohort.staleness
        for place, (client, age) in enumerate(zip(one.cohort.ids, ages)):
            sent = Broadcast(shared={"model": models[number - age]})
            alone = tiny.engine().exchange(algorithm.client, Plain(), sent, np.array([client]), round=number, seed=1)
            assert tiny.gap(tree.rows(alone.reply, 0), tree.rows(one.cohort.reply, place)) <= 1e-12
            stale += int(age > 0)
    assert stale > 3


@pytest.mark.parametrize("lane", ["serial", "batched"])
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_resume_is_exact_with_work_in_flight(lane: str, stop: int) -> None:
    def engine() -> Any:
        return tiny.engine(tiny.convnet, environment=UNEVEN, lane=lane)

    algorithm = fedbuff(buffer=2, batch_size=4, lr=0.05)
    whole = list(run(algorithm, engine(), rounds=8, seed=1))
    held = whole[stop - 1].snapshot
    assert len(held.pending["jobs"]["ids"]) > 0
    saved = replace(held, server=tree.clone(held.server), pending=tree.clone(held.pending))
    rest = run(algorithm, engine(), rounds=8, seed=1, resume=saved)
    for one, other in zip(rest, whole[stop:], strict=True):
        assert tiny.same(one.model, other.model) and one.clock == other.clock
        assert one.cohort.ids.tolist() == other.cohort.ids.tolist()


def test_time_does_not_touch_a_synchronous_run() -> None:
    timed = list(run(plain(batch_size=4), tiny.engine(environment=UNEVEN), rounds=2, seed=1))
    untimed = list(run(plain(batch_size=4), tiny.engine(), rounds=2, seed=1))
    assert [tiny.same(a.model, b.model) for a, b in zip(timed, untimed)] == [True, True]
    assert timed[1].clock > timed[0].clock > 0 and untimed[1].clock == 0


def test_only_models_in_flight_are_kept() -> None:
    rounds = list(run(fedbuff(buffer=2, batch_size=4), tiny.engine(environment=UNEVEN), rounds=8, seed=1))
    for one in rounds:
        kept = one.snapshot.pending
        assert set(kept["sent"]) == {str(version) for version in kept["jobs"]["version"].tolist()}


def test_a_flight_becomes_a_tree_and_back() -> None:
    flight = PendingReplies.of({}, 3, 7)
    assert flight.dispatches == 7 and flight.clock == 0 and flight.absent[:].tolist() == [0, 0, 0]
    sent = Broadcast(shared={"model": {"w": torch.ones(2)}}, personal={"own": torch.arange(2.0)})
    flown = flight.send(np.array([0, 2]), sent, 7, np.array([1.0, 4.0]), delay=0.5, limit=3.0)
    again = PendingReplies.of(flown.tree(), 3, 0)
    assert tiny.same(again.tree(), flown.tree())
    assert again.jobs.ends.tolist() == [1.5, 3.5] and again.jobs.lost.tolist() == [False, True]


# --- what the server learns about its clients ------------------------------------------------------------------------


@dataclass(frozen=True)
class Curious:
    """Everyone, while writing down what the pool says."""

    log: list[Pool]

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        self.log.append(pool)
        return pool.candidates


def test_the_pool_knows_how_long_replies_took_and_who_was_there() -> None:
    log: list[Pool] = []
    list(run(replace(plain(), selection=Curious(log)), Script([1, 2, 5], [1, 1, 1], WaitPolicy(deadline=4)), rounds=2))
    assert np.isnan(log[0].seconds).all() and log[1].seconds.tolist() == [1, 2, 4]
    log.clear()
    engine = tiny.engine(environment=Environment(availability=(1.0, 1.0, 1.0, 1.0, 0.5)))
    list(run(replace(plain(batch_size=4), selection=Curious(log)), engine, rounds=20, seed=1))
    assert log[-1].presence[:4].tolist() == [1, 1, 1, 1] and 0.2 < log[-1].presence[4] < 0.8
    there = np.mean([pool.available[4] for pool in log])
    assert log[-1].presence[4] == pytest.approx(there, abs=1e-12)


def test_staleness_and_rate_of_the_default() -> None:
    server = fedbuff().server
    assert isinstance(server, Buffered) and server.staleness == PolynomialStaleness(power=0.5)
    assert server.buffer == 10 and server.rate == 1.0 and server.weighting == UniformWeights()
