"""The virtual clock, against seconds worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.ifca import ifca
from consilience.core import plans
from consilience.core.federation import Rows
from consilience.core.plans import Work
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.environments import clock, environment
from consilience.environments.environment import Environment
from consilience.selection import PowerOfChoice

ALL = np.arange(3)


def seconds(environment: Environment, round: int = 0, ids: np.ndarray = ALL, seed: int = 0) -> list[float]:
    rows = np.array([10, 20, 40, 0])[ids]
    return clock.seconds(environment, round, ids, seed, rows=rows, down=1000, up=300).tolist()


def test_what_is_left_out_takes_no_time() -> None:
    assert seconds(Environment()) == [0, 0, 0]


def test_computing_moving_and_latency_add_up() -> None:
    assert seconds(Environment(rows_per_second=(1.0, 2.0, 10.0))) == [10, 10, 4]
    assert seconds(Environment(download=500.0)) == [2, 2, 2]
    assert seconds(Environment(upload=(100.0, 300.0, 3.0))) == [3, 1, 100]
    assert seconds(Environment(latency=0.25)) == [0.5, 0.5, 0.5]
    together = Environment(rows_per_second=(1.0, 2.0, 10.0), download=500.0, upload=(100.0, 300.0, 3.0), latency=0.25)
    assert seconds(together) == [15.5, 13.5, 106.5]


def test_speeds_differ_for_good_and_luck_from_round_to_round() -> None:
    spread = Environment(rows_per_second=1.0, speed_spread=0.5)
    assert seconds(spread, 0) == seconds(spread, 7) != seconds(spread, 0, seed=1)
    many, rows = np.arange(4000), np.ones(4000)
    drawn = np.log(clock.seconds(spread, 0, many, 3, rows=rows, down=0, up=0))
    assert drawn.mean() == pytest.approx(0, abs=0.03) and drawn.std() == pytest.approx(0.5, abs=0.02)
    jitter = Environment(latency=0.5, jitter=0.2)
    assert seconds(jitter, 0) == seconds(jitter, 0) != seconds(jitter, 1)
    drawn = np.log(clock.seconds(jitter, 5, many, 3, rows=rows, down=0, up=0))
    assert drawn.mean() == pytest.approx(0, abs=0.02) and drawn.std() == pytest.approx(0.2, abs=0.01)


def test_a_clients_time_does_not_depend_on_who_else_is_asked() -> None:
    uneven = Environment(rows_per_second=(1.0, 2.0, 3.0), speed_spread=1.0, jitter=1.0)
    assert seconds(uneven, 4, np.array([2])) == seconds(uneven, 4)[2:]
    assert seconds(uneven, 4, np.array([0, 2])) == [seconds(uneven, 4)[0], seconds(uneven, 4)[2]]


@given(
    sizes=st.lists(st.integers(0, 23), min_size=1, max_size=6),
    batch=st.one_of(st.none(), st.integers(1, 9)),
    steps=st.integers(0, 12),
)
def test_rows_met_are_those_of_the_plan(sizes: list[int], batch: int | None, steps: int) -> None:
    if not sum(sizes):
        return
    work, total = Work(batch_size=batch), sum(sizes)
    store = Rows.gather(torch.zeros(total, 1), torch.zeros(total), np.split(np.arange(total), np.cumsum(sizes)[:-1]))
    todo = np.where(np.array(sizes) > 0, steps, 0)
    order = np.argsort(-todo, kind="stable")
    plan = plans.draw(work, store, order, todo[order], seed=0, round=0)
    found = clock.rows_met(work, np.array(sizes)[order], todo[order])
    assert found.tolist() == plan.live.sum(0).tolist()


# --- what an engine makes of it --------------------------------------------------------------------------------------

MODEL = 8 * (36 * 8 + 8 + 8 * 3 + 3)  # bytes of tiny.mlp in float64


def test_a_round_on_the_engine() -> None:
    """Sizes 9, 4, 1, 12, 6: with one epoch the fourth is last."""
    (one,) = run(fedavg(batch_size=4), tiny.engine(environment=Environment(rows_per_second=2.0)), rounds=1)
    assert one.clock == 6
    (one,) = run(fedavg(batch_size=4, epochs=2.5), tiny.engine(environment=Environment(rows_per_second=2.0)), rounds=1)
    assert one.clock == 16  # ceil(2.5 x 3) = 8 steps: twelve, twelve and eight rows, half a second each


def test_bytes_take_time() -> None:
    down, up = Environment(download=float(MODEL)), Environment(upload=float(MODEL + 8))  # the reply holds a loss, too
    assert next(run(fedavg(batch_size=4), tiny.engine(environment=down), rounds=1)).clock == 1
    assert next(run(fedavg(batch_size=4), tiny.engine(environment=up), rounds=1)).clock == 1
    one = next(run(ifca(clusters=3, batch_size=4), tiny.engine(environment=down), rounds=1))
    assert one.clock == 3
    timed = tiny.engine(environment=Environment(rows_per_second=2.0, upload=1e12))
    one = next(run(ifca(clusters=3, batch_size=4), timed, rounds=1))
    assert one.clock == pytest.approx(12, abs=1e-6)  # a look at the rows, and an epoch


def test_asking_takes_time() -> None:
    timed = Environment(rows_per_second=2.0)
    asking = PowerOfChoice(count=5, candidates=5)
    (one,) = run(fedavg(batch_size=4, selection=asking), tiny.engine(environment=timed), rounds=1)
    assert one.clock == 12


def test_settings_are_checked() -> None:
    with pytest.raises(Invalid, match="speed_spread has no effect"):
        Environment(speed_spread=0.5)
    with pytest.raises(Invalid, match=r"deadline = 3\.0 drops late replies"):
        Environment(deadline=3.0, silent="broadcast_model")
    with pytest.raises(Invalid, match="enough_replies = 3 drops late replies"):
        Environment(enough_replies=3, silent="broadcast_model")
    with pytest.raises(Invalid, match="upload has 2 values for 5 clients"):
        tiny.engine(environment=Environment(upload=(1.0, 2.0)))
    with pytest.raises(Invalid, match="rows_per_second"):
        Environment(rows_per_second=0.0)
    assert environment("plain", latency=2, deadline=9).deadline == 9
