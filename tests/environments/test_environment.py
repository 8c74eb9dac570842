"""Who works how much, who is there, who is heard: by hand, and by count."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.core.settings import Invalid
from consilience.environments import Environment

ROUNDS = 3000


def frequency(draw, rounds=ROUNDS):
    return np.mean([draw(r) for r in range(rounds)], axis=0)


def near(expected, draws):
    """Within 4.5 standard deviations of a binomial share; exactly, for 0 and 1."""
    expected = np.asarray(expected)
    return 4.5 * np.sqrt(expected * (1 - expected) / draws)


def test_by_default_everyone_is_there_works_in_full_and_is_heard():
    plain = Environment()
    assert plain.available(0, 5, seed=0).tolist() == [True] * 5
    assert plain.reachable(0, [3, 1], seed=0).tolist() == [True, True]
    assert plain.work(0, [3, 1], 0, epochs=2, steps_per_epoch=[4, 7]).tolist() == [8, 14]


@pytest.mark.parametrize(
    ("epochs", "steps_per_epoch", "expected"),
    [(0.5, [4, 5], [2, 3]), (1.1, [50, 3], [55, 4]), (1.5, [3, 1], [5, 2]), (2, [0, 3], [0, 6]), (0, [4], [0])],
)
def test_fractions_of_an_epoch_round_up(epochs, steps_per_epoch, expected):
    ids = list(range(len(steps_per_epoch)))
    work = Environment().work(0, ids, 0, epochs=epochs, steps_per_epoch=steps_per_epoch)
    assert work.tolist() == expected and work.dtype == np.int64


def test_own_epochs_and_budgets_override():
    own = Environment(epochs=(2, 1, 0.5))
    assert own.work(0, [2, 0], 0, epochs=9, steps_per_epoch=[4, 3]).tolist() == [2, 6]
    budget = Environment(steps=(7, 0, 3))
    assert budget.work(0, [0, 1, 2], 0, epochs=9, steps_per_epoch=[4, 4, 4]).tolist() == [7, 0, 3]
    assert budget.work(0, [0, 2], 0, epochs=9, steps_per_epoch=[0, 4]).tolist() == [0, 3]  # no rows, no steps


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("cohort", [1, 2, 10, 33])
def test_the_straggler_fraction_is_of_the_cohort(fraction, cohort):
    environment = Environment(stragglers=fraction)
    for r in range(5):
        ids = np.random.default_rng(r).permutation(100)[:cohort]
        assert environment.late(r, ids, seed=1).sum() == int(np.floor(fraction * cohort + 0.5))


def test_stragglers_do_whole_epochs_in_one_to_e():
    environment = Environment(stragglers=0.5)
    seen = []
    for r in range(1000):
        work = environment.work(r, np.arange(10), 3, epochs=5, steps_per_epoch=np.full(10, 7))
        late = environment.late(r, np.arange(10), seed=3)
        assert (work[~late] == 35).all() and late.sum() == 5
        assert (work % 7 == 0).all()
        seen.extend(work[late] // 7)
    shares = np.bincount(seen, minlength=6) / len(seen)
    assert shares[0] == 0 and shares[5] == 0
    assert (np.abs(shares[1:5] - 0.25) < near(0.25, len(seen))).all()


@given(
    epochs=st.floats(2, 20),
    steps=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    round=st.integers(0, 10_000),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=200, deadline=None)
def test_straggler_work_is_always_some_but_never_all(epochs, steps, round, seed):
    steps = np.array(steps)
    ids = np.arange(len(steps))
    work = Environment(stragglers=1.0).work(round, ids, seed, epochs=epochs, steps_per_epoch=steps)
    assert (work % steps == 0).all()
    assert (work // steps >= 1).all() and (work // steps < epochs).all()


def test_with_one_epoch_stragglers_stop_within_it():
    environment = Environment(stragglers=1.0)
    draws = [environment.work(r, [0, 1, 2, 3], 0, epochs=1, steps_per_epoch=[5, 2, 1, 0]) for r in range(2000)]
    five, two, one, none = np.array(draws).T
    shares = np.bincount(five, minlength=6) / 2000
    assert shares[0] == 0 and shares[5] == 0 and (np.abs(shares[1:5] - 0.25) < near(0.25, 2000)).all()
    assert (two == 1).all() and (one == 1).all() and (none == 0).all()  # one step cannot be halved
    budget = Environment(stragglers=1.0, steps=(9,))
    spent = {int(budget.work(r, [0], 0, epochs=3, steps_per_epoch=[4])[0]) for r in range(500)}
    assert spent == set(range(1, 9))


def test_stragglers_are_everyone_in_turn():
    late = frequency(lambda r: Environment(stragglers=0.3).late(r, np.arange(10), seed=0))
    assert (np.abs(late - 0.3) < near(0.3, ROUNDS)).all()


def test_dropped_stragglers_are_the_ones_that_are_not_heard():
    partial = Environment(stragglers=0.4)
    drop = Environment(stragglers=0.4, straggler_policy="drop")
    for r in range(20):
        ids = np.arange(10)
        assert partial.reachable(r, ids, seed=0).all()
        assert np.array_equal(drop.reachable(r, ids, seed=0), ~drop.late(r, ids, seed=0))


def test_probabilities_hold():
    each = (0.0, 0.2, 0.5, 0.9, 1.0)
    ids = np.arange(5)
    heard = frequency(lambda r: Environment(communication=each).reachable(r, ids, seed=0))
    there = frequency(lambda r: Environment(availability=each).available(r, 5, seed=0))
    assert (np.abs(heard - each) <= near(each, ROUNDS)).all()
    assert (np.abs(there - each) <= near(each, ROUNDS)).all()
    both = frequency(lambda r: Environment(communication=each, dropout=0.25).reachable(r, ids, seed=0))
    expected = 0.75 * np.array(each)  # independent of one another
    assert (np.abs(both - expected) <= near(expected, ROUNDS)).all()
    common = frequency(lambda r: Environment(availability=0.3).available(r, 5, seed=0))
    assert (np.abs(common - 0.3) < near(0.3, ROUNDS)).all()


def test_clients_and_decisions_are_independent():
    environment = Environment(communication=0.5, availability=0.5)
    heard = np.array([environment.reachable(r, np.arange(4), seed=0) for r in range(ROUNDS)])
    there = np.array([environment.available(r, 4, seed=0) for r in range(ROUNDS)])
    together = np.corrcoef(np.concatenate([heard, there], axis=1).T)
    assert np.abs(together - np.eye(8)).max() < 4.5 / np.sqrt(ROUNDS)


@given(ids=st.lists(st.integers(0, 60), min_size=1, max_size=20, unique=True), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_clients_fate_does_not_depend_on_who_else_was_chosen(ids, seed):
    environment = Environment(communication=0.5, dropout=0.2)
    everyone = environment.reachable(2, np.arange(61), seed)
    assert np.array_equal(environment.reachable(2, ids, seed), everyone[ids])
    all_late = Environment(stragglers=1.0)
    work = all_late.work(2, np.arange(61), seed, epochs=9, steps_per_epoch=np.ones(61, int))
    assert np.array_equal(all_late.work(2, ids, seed, epochs=9, steps_per_epoch=np.ones(len(ids), int)), work[ids])


def test_same_seed_same_fate_other_seed_or_round_another():
    environment = Environment(communication=0.5, availability=0.5, stragglers=0.5)
    ids = np.arange(200)

    def fate(round, seed):
        work = environment.work(round, ids, seed, epochs=9, steps_per_epoch=np.ones(200, int))
        return np.stack([environment.available(round, 200, seed), environment.reachable(round, ids, seed), work])

    np.random.seed(0)
    first = fate(3, 4)
    np.random.seed(1)
    assert np.array_equal(first, fate(3, 4))
    for other in (fate(4, 3), fate(4, 4), fate(3, 5)):
        assert ((first != other).sum(1) > 40).all()


def test_no_one_chosen_is_no_error():
    environment = Environment(stragglers=0.5, communication=(0.5, 0.5))
    assert environment.reachable(0, [], 0).tolist() == []
    assert environment.work(0, [], 0, epochs=2, steps_per_epoch=[]).tolist() == []


@pytest.mark.parametrize("key", ["epochs", "steps", "communication", "availability"])
def test_lengths_are_checked_against_the_clients(key):
    environment = Environment(**{key: (1, 1, 1)})
    environment.check_against(3)
    with pytest.raises(Invalid, match=f"Environment.{key} has 3 values for 5 clients: give one each"):
        environment.check_against(5)


def test_a_client_without_a_value_is_named():
    with pytest.raises(Invalid, match=r"Environment.communication has 2 values, none for client 4"):
        Environment(communication=(0.5, 0.5)).reachable(0, [1, 4], 0)
    with pytest.raises(Invalid, match=r"steps_per_epoch has shape \(1,\) for 2 clients"):
        Environment().work(0, [1, 4], 0, epochs=1, steps_per_epoch=[3])
    with pytest.raises(Invalid, match="round = -1"):
        Environment().reachable(-1, [0], 0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"stragglers": 1.5}, "Environment.stragglers = 1.5"),
        ({"dropout": -0.1}, "Environment.dropout = -0.1"),
        ({"communication": 2.0}, "Environment.communication = 2.0"),
        ({"communication": (0.5, 2.0)}, r"Environment.communication\[1\] = 2.0"),
        ({"availability": (float("nan"),)}, r"Environment.availability\[0\] = nan"),
        ({"epochs": (1, -1)}, r"Environment.epochs\[1\] = -1"),
        ({"steps": (1, 2.5)}, r"Environment.steps\[1\] = 2.5"),
        ({"steps": (1,), "epochs": (1,)}, "Environment.epochs and Environment.steps"),
        ({"silent": "ignore"}, "Environment.silent = 'ignore' is not one of broadcast_model, renormalise"),
        ({"straggler_policy": "wait"}, "Environment.straggler_policy = 'wait'"),
    ],
)
def test_bad_settings_name_the_key(bad, message):
    with pytest.raises(Invalid, match=message):
        Environment(**bad)
