"""Weights in splitting: which change the problem, which only the way to its solution; on quadratics, in closed form.

F_j(w) = sum_i CURVES[j, i] (w_i - CENTRES[j, i])^2. With exact proxes z_j = x - step grad F_j(x) is what keeps x where
it is, so x = sum_j p_j z_j holds there if and only if sum_j p_j grad F_j(x) = 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from test_splitting import BEST_STEP, CENTRES, CURVES, FULL, MINIMUM, SLOPES, found, last, quadratics

from consilience.algorithms.fedprox_fedsplit import fedprox_fedsplit
from consilience.algorithms.fedsplit import fedsplit
from consilience.core.exchange import Cohort
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.environments.environment import Environment
from consilience.selection import Uniform
from consilience.server import DualWeights, SimProxWeights
from consilience.server.averaging.weighting.schedule import ScheduleWeights
from consilience.server.rules.splitting import Splitting

GIVEN = (0.1, 0.2, 0.3, 0.4)
PACES = ((0.05, 0.15, 0.3, 0.5), (0.4, 0.3, 0.2, 0.1), (0.25, 0.25, 0.1, 0.4))  # a learned table, say


def minimum(p: Any) -> np.ndarray:
    """Of sum_j p_j F_j."""
    p = np.asarray(p)[:, None]
    return (p * CURVES * CENTRES).sum(0) / (p * CURVES).sum(0)


def prox(v: np.ndarray, step: float) -> np.ndarray:
    """[K, d] argmin_w F_j(w) + |w - v_j|^2 / 2 step, for all j."""
    return (v + step * SLOPES * CENTRES) / (1 + step * SLOPES)


@pytest.mark.parametrize("keeps_z", [False, True])
@pytest.mark.parametrize("count", [None, 2])
def test_fixed_weights_minimise_their_own_sum(keeps_z: bool, count: int | None) -> None:
    """In the inner product sum_j p_j <u_j, v_j> the prox of F_j is the same and the projection is the p-mean."""
    options: Any = {"selection": Uniform(count=count)} if count else {}
    algorithm = fedsplit(step=BEST_STEP, epochs=15, weights=GIVEN, keeps_z=keeps_z, **FULL, **options)
    assert np.abs(found(last(algorithm, 110 if count else 40)) - minimum(GIVEN)).max() < 1e-8
    assert np.abs(minimum(GIVEN) - MINIMUM).max() > 0.3


def test_given_weights_leave_out_clients_without_data() -> None:
    algorithm = fedsplit(step=BEST_STEP, epochs=15, weights=(*GIVEN, 5.0), **FULL)
    assert np.abs(found(last(algorithm, 40, quadratics(empty=1))) - minimum(GIVEN)).max() < 1e-8


@pytest.mark.parametrize(
    "weighting",
    [
        SimProxWeights(compare_on="updates"),  # the quadratics start at a model of zeros, which has no direction
        pytest.param(SimProxWeights(compare_on="updates", softmax=False), marks=pytest.mark.slow),
        pytest.param(SimProxWeights(similarity="gaussian", temperature=0.5), marks=pytest.mark.slow),
        pytest.param(ScheduleWeights(table=PACES), marks=pytest.mark.slow),
        pytest.param(ScheduleWeights(table=PACES[:1] * 3), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("relaxation", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_weights_as_paces_keep_the_true_minimiser(weighting: Any, relaxation: float) -> None:
    algorithm = fedsplit(
        step=BEST_STEP, epochs=30, keeps_z=True, weighting=weighting, relaxation=relaxation, **{**FULL, "lr": 0.08}
    )
    rounds = list(run(algorithm, quadratics(), rounds=500))  # the slowest pace is a small share of the fastest
    assert np.abs(found(rounds[-1]) - MINIMUM).max() < 1e-7
    plain = found(last(fedsplit(step=BEST_STEP, epochs=30, keeps_z=True, relaxation=relaxation, **FULL), 2))
    assert np.abs(found(rounds[1]) - plain).max() > 1e-3  # they do take another way


def test_paces_with_partial_participation_and_partial_work_keep_it_too() -> None:
    algorithm = fedprox_fedsplit(
        step=BEST_STEP,
        epochs=1,
        selection=Uniform(count=3),
        keeps_z=True,
        weighting=SimProxWeights(compare_on="updates"),
        **FULL,
    )
    world = Environment(steps=(1, 3, 1, 2), communication=0.8)
    assert np.abs(found(last(algorithm, 400, quadratics(environment=world))) - MINIMUM).max() < 1e-7


def test_rounds_with_paces_equal_plain_numpy() -> None:
    """z_j <- z_j + 2 relaxation (a_j / max a) (w_j - x), and x stays the mean of every z."""
    table, step, rate, relaxation = np.array(PACES), 0.4, 0.07, 0.8
    algorithm = fedsplit(
        step=step, lr=rate, batch_size=None, epochs=3, keeps_z=True, relaxation=relaxation,
        weighting=ScheduleWeights(table=PACES), weights=GIVEN,
    )  # fmt: skip
    x, z, p = np.zeros(2), np.zeros((4, 2)), np.array(GIVEN)
    for number, one in enumerate(run(algorithm, quadratics(), rounds=3)):
        ends = np.tile(x, (4, 1))
        for _ in range(3):
            ends = ends - rate * (SLOPES * (ends - CENTRES) + (ends - (2 * x - z)) / step)
        z = z + 2 * relaxation * (table[number] / table[number].max())[:, None] * (ends - x)
        x = p @ z
        np.testing.assert_allclose(found(one), x, rtol=0, atol=1e-13)
        np.testing.assert_allclose(one.snapshot.server["z"]["w"].numpy(), z, rtol=0, atol=1e-13)
        np.testing.assert_allclose(one.notes["weights"].numpy(), table[number], rtol=0, atol=1e-15)


# --- why weights that change from round to round have no place in the mean ------------------------------------------


def weighted_means(weigh: Any, rounds: int = 400) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """(x, last weights, way) of splitting that takes x = sum_j p_j z_j with this round's p, which we do not offer."""
    x, z, way = np.zeros(2), np.zeros((4, 2)), []
    p = np.full(4, 0.25)
    for number in range(rounds):
        ends = prox(2 * x - z, BEST_STEP)
        p = weigh(number, ends, x)
        z = z + 2 * (ends - x)
        x = p @ z
        way.append(x)
    return x, p, way


def by_simprox(number: int, ends: np.ndarray, x: np.ndarray) -> np.ndarray:
    cohort = Cohort(
        reply={"model": {"params": {"w": torch.tensor(ends)}, "buffers": {}}},
        ids=np.arange(4),
        examples=torch.ones(4, dtype=torch.float64),
        steps=np.ones(4, np.int64),
        round=number,
    )
    model = {"params": {"w": torch.tensor(x)}, "buffers": {}}
    return SimProxWeights(similarity="gaussian", softmax=False).weigh(cohort, model, {})[0].numpy()


def test_a_mean_by_changing_weights_never_rests() -> None:
    """Two rows in turn: x goes to and fro between two points, and neither is the minimiser of anything we asked for."""
    _, _, way = weighted_means(lambda number, ends, x: np.array(PACES[number % 2]))
    assert np.abs(way[-1] - way[-3]).max() < 1e-12 and np.abs(way[-1] - way[-2]).max() > 0.05
    for p in (np.full(4, 0.25), PACES[0], PACES[1]):
        assert min(np.abs(one - minimum(p)).max() for one in way[-2:]) > 0.01


def test_a_mean_by_weights_that_settle_minimises_the_sum_with_those() -> None:
    x, p, _ = weighted_means(lambda number, ends, x: np.array(PACES[0]) if number > 5 else np.full(4, 0.25))
    assert np.abs(x - minimum(p)).max() < 1e-12


def test_a_mean_by_simprox_leaves_the_minimiser() -> None:
    """Near the minimiser all ends agree, but the Gaussian, relative to their mean distance, still tells them apart."""
    *_, way = weighted_means(by_simprox)
    assert np.abs(np.stack(way[-50:]) - MINIMUM).max(1).min() > 1e-3


# --- refusals and settings --------------------------------------------------------------------------------------------


def test_refusals() -> None:
    with pytest.raises(Invalid, match="fedsplit: a weighting needs keeps_z = True: clients that keep z"):
        fedsplit(step=1.0, weighting=SimProxWeights())
    with pytest.raises(Invalid, match="weights has 2 numbers for 4 clients"):
        last(fedsplit(step=1.0, weights=(1.0, 2.0)), 1)
    with pytest.raises(Invalid, match="out of range"):
        Splitting(weights=(1.0, 0.0))
    with pytest.raises(Invalid, match="cannot move against its own reply"):
        last(fedsplit(step=1.0, keeps_z=True, weighting=ScheduleWeights(table=((-0.5, 0.5, 0.5, 0.5),)), **FULL), 1)


def test_clients_report_what_a_weighting_reads() -> None:
    own = fedsplit(step=1.0, keeps_z=True, weighting=SimProxWeights(previous_model="own"), batch_size=4, epochs=1)
    rounds = list(run(own, tiny.engine(tiny.convnet), rounds=2, seed=1))
    assert "moved" in rounds[-1].cohort.reply and tiny.finite(rounds[-1].model)
    dual = fedsplit(step=1.0, keeps_z=True, weighting=DualWeights(), batch_size=4, epochs=1)
    assert tiny.finite(list(run(dual, tiny.engine(tiny.convnet), rounds=2, seed=1))[-1].model)
