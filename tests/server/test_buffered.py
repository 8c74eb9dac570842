"""The asynchronous server's arithmetic, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import Script

from consilience.algorithms.fedasync import fedasync
from consilience.client.terms.proximal import Proximal
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.rounds import run
from consilience.core.tree import Tree
from consilience.environments.environment import Environment
from consilience.server import Averaging, SimProxWeights, UniformWeights
from consilience.server.rules.buffered import Buffered
from consilience.server.rules.staleness import ConstantStaleness, HingeStaleness, PolynomialStaleness


def model(w: list[float], mean: float = 0.0, count: int = 0) -> Tree:
    buffers = {"mean": torch.tensor(mean, dtype=torch.float64), "count": torch.tensor(count)}
    return {"params": {"w": torch.tensor(w, dtype=torch.float64)}, "buffers": buffers}


def stacked(models: list[Tree]) -> Tree:
    return {
        kind: {name: torch.stack([one[kind][name] for one in models]) for name in models[0][kind]}
        for kind in ("params", "buffers")
    }


def cohort(ends: list[Tree], ages: list[int], starts: list[Tree] | None) -> Cohort:
    m = len(ends)
    return Cohort(
        reply={"model": stacked(ends)},
        ids=np.arange(m),
        examples=torch.arange(1, m + 1, dtype=torch.float64),
        steps=np.ones(m, dtype=np.int64),
        round=9,
        staleness=np.array(ages) if any(ages) else None,
        received=None if starts is None else Broadcast(shared={}, personal={"model": stacked(starts)}),
    )


def moved(server: Buffered, now: Tree, replies: Cohort) -> tuple[Tree, dict[str, Any]]:
    after, notes = server.update(server.init(now, 9), replies)
    return server.model(after), notes


PLAIN = Averaging(weighting=UniformWeights())


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (ConstantStaleness(), [1, 1, 1, 1]),
        (PolynomialStaleness(power=0.5), [1, 0.5, 1 / 3, 0.25]),
        (PolynomialStaleness(power=1.0), [1, 1 / 4, 1 / 9, 1 / 16]),
        (HingeStaleness(slope=2.0, tolerance=3.0), [1, 1, 1 / 11, 1 / 25]),
    ],
)
def test_staleness_functions(part: Any, expected: list[float]) -> None:
    ages = torch.tensor([0, 3, 8, 15], dtype=torch.float64)
    assert part.discount(ages).tolist() == pytest.approx(expected, abs=1e-15)


@given(st.floats(0, 1e6), st.floats(0, 5), st.floats(0.01, 20), st.floats(0, 20))
def test_staleness_is_a_factor_that_never_grows(age: float, power: float, slope: float, tolerance: float) -> None:
    ages = torch.tensor([0.0, age, age + 1], dtype=torch.float64)
    for part in (PolynomialStaleness(power=power), HingeStaleness(slope=slope, tolerance=tolerance)):
        first, one, other = part.discount(ages).tolist()
        assert first == 1 >= one >= other >= 0


def test_updates_are_repeated_from_the_current_model() -> None:
    """w = (10, 10); steps (1, 0) from an old model (3 rounds: half) and (0, 4) from the current one: their mean."""
    server = Buffered(averaging=PLAIN, buffer=2)
    starts = [model([2, 2]), model([10, 10])]
    ends = [model([3, 2], mean=4, count=5), model([10, 14], mean=8, count=7)]
    now, notes = moved(server, model([10, 10], mean=1, count=2), cohort(ends, [3, 0], starts))
    assert now["params"]["w"].tolist() == [10.25, 12]
    assert float(now["buffers"]["mean"]) == 6 and int(now["buffers"]["count"]) == 7  # statistics are not steps
    assert notes["staleness"].tolist() == [3, 0] and notes["discount"].tolist() == [0.5, 1]
    assert notes["weights"].tolist() == [0.5, 0.5]


def test_fedasync_mixes_models() -> None:
    """(1 - a) w + a w_k with a = 0.6 / 2 = 0.3: from (10, 0) towards (0, 10); where it started plays no part."""
    server = Buffered(averaging=PLAIN, buffer=1, rate=0.6, moves="model")
    replies = cohort([model([0, 10], mean=1, count=3)], [3], [model([77, 77])])
    now, _ = moved(server, model([10, 0], mean=0, count=4), replies)
    assert now["params"]["w"].tolist() == pytest.approx([7, 3], abs=1e-15)
    assert float(now["buffers"]["mean"]) == pytest.approx(0.3) and int(now["buffers"]["count"]) == 3


def test_a_rate_also_shortens_fresh_replies() -> None:
    server = Buffered(averaging=PLAIN, buffer=2, rate=0.5)
    now, _ = moved(server, model([10, 10]), cohort([model([12, 10]), model([10, 6])], [0, 0], None))
    assert now["params"]["w"].tolist() == [10.5, 9]


def test_fresh_replies_are_averaged_as_they_are() -> None:
    draw = torch.Generator().manual_seed(0)
    ends = [model(torch.randn(5, generator=draw, dtype=torch.float64).tolist()) for _ in range(3)]
    server, start = Buffered(averaging=Averaging(), buffer=3), model([0.3] * 5)
    now, notes = moved(server, start, cohort(ends, [0, 0, 0], None))
    expected, found = Averaging().update(Averaging().init(start, 9), cohort(ends, [0, 0, 0], None))
    assert tiny.same(now, expected["model"]) and torch.equal(notes["weights"], found["weights"])


def test_simprox_weighs_whole_steps() -> None:
    """Two clients went the same way as far: SimProx weighs them alike, however old one of them is."""
    server = Buffered(averaging=Averaging(weighting=SimProxWeights(softmax=False)), buffer=2)
    starts, ends = [model([5, 5]), model([1, 1])], [model([6, 5]), model([2, 1])]
    now, notes = moved(server, model([1, 1]), cohort(ends, [3, 0], starts))
    assert notes["weights"].tolist() == pytest.approx([0.5, 0.5], abs=1e-12)
    assert notes["movement"].tolist() == pytest.approx([1, 1], abs=1e-12)
    assert now["params"]["w"].tolist() == pytest.approx([1.75, 1], abs=1e-12)


def test_fedasync_by_hand_on_a_schedule() -> None:
    """Two clients of 1 and 3 seconds whose replies are what they were sent plus 1 and plus 10; a = 0.5 / (1 + tau)."""
    algorithm = fedasync(alpha=0.5, mu=0.0, staleness=PolynomialStaleness(power=1.0))
    rounds = list(run(algorithm, Script([1, 3], [1, 10]), rounds=4))
    # t=1: 0 sends 1 -> 0.5; t=2: 0 sends 1.5 -> 1. t=3: 1 has waited longest, sends 10, two rounds old: 1 + 9/6 = 2.5;
    # then 0, sent 1 and one round old, sends 2: 2.5 - 0.5/4
    assert [float(one.model["params"]["w"]) for one in rounds] == pytest.approx([0.5, 1, 2.5, 2.375], abs=1e-12)
    assert [one.cohort.ids.tolist() for one in rounds] == [[0], [0], [1], [0]]
    assert [one.clock for one in rounds] == [1, 2, 3, 3]


def test_fedasync_trains_near_what_it_was_sent() -> None:
    assert fedasync(mu=0.2).client.terms == (Proximal(mu=0.2),)  # type: ignore[attr-defined]
    assert fedasync(mu=0.0).client.terms == ()  # type: ignore[attr-defined]


def test_it_learns_from_clients_of_different_speed() -> None:
    uneven = Environment(rows_per_second=(50.0, 20.0, 10.0, 30.0, 5.0), jitter=0.2)
    engine = tiny.engine(environment=uneven)
    rounds = list(run(fedasync(lr=0.1, batch_size=4), engine, rounds=40, seed=1))
    losses = [float(one.cohort.reply["loss"].mean()) for one in rounds]
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:5])
    assert rounds[-1].clock < 40 * 12 / 5  # nobody waits for the slowest
