"""Batches in which classes have given shares: frequencies, purity of the plan, lanes, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn

import consilience as cs
from consilience.core import plans
from consilience.core.federation import Federation
from consilience.core.plans import Work
from consilience.core.rounds import run
from consilience.core.settings import Invalid

LABELS = ([0] * 90 + [2] * 9 + [3], [1] * 5, [0, 1, 2, 3] * 10)


def federation() -> Federation:
    draw = torch.Generator().manual_seed(0)
    return Federation.from_clients(
        [(torch.randn(len(y), 2, generator=draw, dtype=torch.float64), torch.tensor(y)) for y in LABELS]
    )


def drawn(shares: Any, client: int, *, others: tuple[int, ...] = (), steps: int = 300, round: int = 0) -> torch.Tensor:
    """[S, B] rows of a client, planned alone or in a group."""
    ids = np.array(sorted((client, *others)))
    work = Work(batch_size=16, epochs=100, class_shares=shares)
    plan = plans.draw(work, federation().train, ids, np.full(len(ids), steps), seed=1, round=round)
    return plan.rows[:, int(np.searchsorted(ids, client))]


def test_classes_that_a_client_has_are_equally_likely() -> None:
    data = federation().train
    y = data.y[drawn("equal", 0)].flatten()
    assert np.bincount(y, minlength=4) / len(y) == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3], abs=0.025)
    rows = drawn("equal", 0).flatten()
    counts = np.bincount(rows[y == 0], minlength=90)[:90]
    assert counts.min() > 0 and counts.max() < 2.5 * counts.mean()  # rows of a class alike


def test_classes_have_given_shares_among_those_that_are_there() -> None:
    data = federation().train
    y = data.y[drawn((4.0, 1.0, 2.0, 2.0), 0)].flatten()
    assert np.bincount(y, minlength=4) / len(y) == pytest.approx([0.5, 0, 0.25, 0.25], abs=0.025)
    every = data.y[drawn((4.0, 1.0, 2.0, 3.0), 2)].flatten()
    assert np.bincount(every) / len(every) == pytest.approx([0.4, 0.1, 0.2, 0.3], abs=0.025)
    assert set(data.y[drawn("equal", 1)].flatten().tolist()) == {1}


def test_a_plan_depends_on_seed_round_and_client_alone() -> None:
    alone = drawn("equal", 2)
    assert torch.equal(alone[:, :16], drawn("equal", 2, others=(0, 1))[:, :16])
    assert not torch.equal(alone, drawn("equal", 2, round=1))
    own = federation().train
    assert int(alone.min()) >= int(own.starts[2]) and int(alone.max()) < int(own.starts[2] + own.sizes[2])
    small = drawn("equal", 1)  # five rows: five slots alone, more of them padding in a group
    assert torch.equal(small, drawn("equal", 1, others=(0,))[:, : small.shape[1]])


def test_lanes_agree_and_the_work_is_as_before() -> None:
    algorithm = cs.fedavg(lr=0.1, batch_size=4, epochs=2, class_shares="equal")
    models = []
    for lane in ("serial", "batched", "streams"):
        last = list(run(algorithm, tiny.engine(lane=lane), rounds=2, seed=3))[-1]
        models.append(last.model)
    assert tiny.gap(models[0], models[1]) < 1e-9 and tiny.gap(models[0], models[2]) < 1e-9
    plain = list(run(cs.fedavg(lr=0.1, batch_size=4, epochs=2), tiny.engine(), rounds=2, seed=3))[-1]
    assert np.array_equal(plain.cohort.steps, last.cohort.steps) and tiny.gap(plain.model, models[0]) > 1e-4


@pytest.mark.parametrize(
    ("shares", "y", "words"),
    [
        ("equal", torch.rand(4, 1), "class_shares = 'equal' needs one class number a row"),
        ((1.0, 2.0), torch.tensor([0, 1, 2, 2]), "class_shares has 2 weights, but there is a class number 2"),
    ],
)
def test_other_targets_are_refused_before_training(shares: Any, y: torch.Tensor, words: str) -> None:
    data = Federation.from_clients([(torch.zeros(4, 3), y)])
    with pytest.raises(Invalid) as caught:
        cs.train(nn.Linear(3, 3 if y.dim() == 1 else 1), data, cs.fedavg(class_shares=shares), rounds=1, progress=False)
    assert words in str(caught.value)
    engine = cs.Vectorised(cs.Task(nn.Linear(3, 3 if y.dim() == 1 else 1)), data)
    with pytest.raises(Invalid) as caught:
        next(cs.run(cs.fedavg(class_shares=shares), engine, rounds=1))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((1.0, 0.0), "class_shares[1] = 0.0 is out of range"),
        ((1.0, 1.0), "equal weights are written 'equal'"),
        ("even", "class_shares = 'even'"),
    ],
)
def test_bad_shares_are_refused_by_name(shares: Any, words: str) -> None:
    with pytest.raises(Invalid) as caught:
        cs.fedavg(class_shares=shares)
    assert words in str(caught.value)
