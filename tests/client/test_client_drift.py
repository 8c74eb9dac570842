"""SCAFFOLD, FedDyn and FedDC on heterogeneous least-squares clients, against plain NumPy and the true optimum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.feddc import feddc
from consilience.algorithms.feddyn import feddyn
from consilience.algorithms.scaffold import scaffold
from consilience.core.algorithm import Algorithm
from consilience.core.federation import Federation
from consilience.core.rounds import Round, run
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.selection import Uniform
from consilience.server import UniformWeights
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")
SIZES, WIDTH = (40, 25, 30), 3  # well-conditioned, so that few rounds are enough
each_lane = pytest.mark.parametrize("lane", ["serial", "batched"])


def clients() -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(3)
    shapes = np.eye(WIDTH) + 0.2 * draw.normal(size=(len(SIZES), WIDTH, WIDTH))
    return [(draw.normal(size=(n, WIDTH)) @ shapes[k], draw.normal(size=n) + 3 * k) for k, n in enumerate(SIZES)]


class Line(nn.Module):
    """x -> <w, x>, started at w = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def engine(lane: str = "serial", environment: Environment | None = None) -> Vectorised:
    data = Federation.from_clients([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in clients()])
    task = Task(Line(), loss="squared_error")
    options: dict[str, Any] = {"lane": lane, "clients_at_once": 8, "environment": environment}
    return Vectorised(task, data, device="cpu", dtype="float64", **options)


def slope(k: int, w: np.ndarray) -> np.ndarray:
    x, y = clients()[k]
    return 2 * x.T @ (x @ w - y) / len(y)


def optimum() -> np.ndarray:
    """The minimiser of the plain mean of the clients' losses."""
    hessian = sum(2 * x.T @ x / len(y) for x, y in clients())
    return np.linalg.solve(hessian, sum(2 * x.T @ y / len(y) for x, y in clients()))


def rate() -> float:
    return 0.5 / max(float(np.linalg.eigvalsh(2 * x.T @ x / len(y)).max()) for x, y in clients())


def trained(algorithm: Algorithm, rounds: int, lane: str = "serial", **options: Any) -> list[Round]:
    return list(run(algorithm, engine(lane, **options), rounds=rounds, seed=5))


def weights_of(one: Round) -> np.ndarray:
    return one.model["params"]["w"].numpy()


def local(k: int, w: np.ndarray, steps: int, extra: Any) -> np.ndarray:
    y = w.copy()
    for _ in range(steps):
        y = y - rate() * (slope(k, y) + extra(y))
    return y


# --- SCAFFOLD --------------------------------------------------------------------------------------------------------


@each_lane
def test_scaffold_with_one_full_batch_step_is_gradient_descent(lane: str) -> None:
    w = np.ones(WIDTH)
    for one in trained(scaffold(lr=rate(), batch_size=None), 6, lane):
        w = w - rate() * np.mean([slope(k, w) for k in range(3)], axis=0)
        np.testing.assert_allclose(weights_of(one), w, rtol=0, atol=1e-12)


@each_lane
def test_scaffold_with_some_clients_a_round_is_the_papers_algorithm(lane: str) -> None:
    """Option II by hand: two of three clients a round, four steps each."""
    w, c, mine = np.ones(WIDTH), np.zeros(WIDTH), np.zeros((3, WIDTH))
    for one in trained(scaffold(lr=rate(), batch_size=None, epochs=4, selection=Uniform(count=2)), 6, lane):
        moves, changes = [], []
        for k in one.chosen:
            y = local(k, w, 4, lambda _, k=k: c - mine[k])  # noqa: B023
            plus = mine[k] - c + (w - y) / (4 * rate())
            moves.append(y - w)
            changes.append(plus - mine[k])
            mine[k] = plus
        w, c = w + np.mean(moves, axis=0), c + 2 / 3 * np.mean(changes, axis=0)
        np.testing.assert_allclose(weights_of(one), w, rtol=0, atol=1e-12)
        state, memory = one.snapshot.server["ledgers"], one.snapshot.memory["client"]
        np.testing.assert_allclose(state["control_variate"]["w"].numpy(), c, rtol=0, atol=1e-11)
        np.testing.assert_allclose(memory["control_variate"]["w"].numpy(), mine, rtol=0, atol=1e-11)


def test_scaffold_reaches_the_optimum_where_fedavg_does_not() -> None:
    usual: dict[str, Any] = {"lr": rate(), "batch_size": None, "epochs": 5}
    found = weights_of(trained(scaffold(**usual), 40)[-1])
    assert np.linalg.norm(found - optimum()) < 1e-8
    biased = weights_of(trained(fedavg(weighting=UniformWeights(), **usual), 30)[-1])
    assert np.linalg.norm(biased - optimum()) > 1e-2


def test_uneven_work_divides_by_each_clients_own_steps() -> None:
    """A client that did no step keeps its control variate, and changes nothing."""
    uneven = Environment(steps=(3, 0, 1))
    (one,) = trained(scaffold(lr=rate(), batch_size=None), 1, environment=uneven)
    ends = [local(k, np.ones(WIDTH), steps, lambda _: 0) for k, steps in enumerate((3, 0, 1))]
    kept = one.snapshot.memory["client"]["control_variate"]["w"].numpy()
    np.testing.assert_allclose(kept[0], (1 - ends[0]) / (3 * rate()), atol=1e-11)
    np.testing.assert_allclose(kept[1], 0)
    np.testing.assert_allclose(kept[2], slope(2, np.ones(WIDTH)), atol=1e-11)


def test_the_rate_that_decays_is_the_one_that_counts() -> None:
    rounds = trained(scaffold(lr=rate(), lr_decay=0.5, batch_size=None), 2)
    before = weights_of(rounds[0])
    kept = rounds[1].snapshot.memory["client"]["control_variate"]["w"].numpy()
    np.testing.assert_allclose(kept, [slope(k, before) for k in range(3)], atol=1e-11)


@pytest.mark.parametrize("solver", [{"momentum": 0.9}, {"optimiser": "adam"}])
@pytest.mark.parametrize("recipe", [scaffold, feddc])
def test_solvers_that_hide_the_gradient_are_refused(recipe: Any, solver: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=r"control variates .* are incompatible with .* plain SGD only"):
        recipe(batch_size=None, **solver)


def test_control_variates_cover_parameters_only() -> None:
    """Batch-norm statistics have no gradient (READINGS X-3)."""
    import tiny

    (one,) = run(scaffold(batch_size=4), tiny.engine(tiny.convnet), rounds=1)
    assert set(one.snapshot.server["ledgers"]["control_variate"]) == set(one.model["params"])
    assert set(one.cohort.reply["control_change"]) == set(one.model["params"])


# --- FedDyn and FedDC ------------------------------------------------------------------------------------------------


@each_lane
def test_feddyn_with_some_clients_a_round_is_the_papers_algorithm(lane: str) -> None:
    """h is divided by all three clients, the model's mean by the two that take part."""
    alpha = 0.7
    w, h, gradients = np.ones(WIDTH), np.zeros(WIDTH), np.zeros((3, WIDTH))
    algorithm = feddyn(alpha=alpha, lr=rate(), batch_size=None, epochs=4, selection=Uniform(count=2))
    for one in trained(algorithm, 6, lane):
        ends = []
        for k in one.chosen:
            end = local(k, w, 4, lambda y, k=k: -gradients[k] + alpha * (y - w))  # noqa: B023
            gradients[k] -= alpha * (end - w)
            ends.append(end)
        h = h - alpha / 3 * sum(end - w for end in ends)
        w = np.mean(ends, axis=0) - h / alpha
        np.testing.assert_allclose(weights_of(one), w, rtol=0, atol=1e-11)
        drift = one.snapshot.server["ledgers"]["mean_drift"]["w"].numpy()
        np.testing.assert_allclose(-alpha * drift, h, rtol=0, atol=1e-11)


@each_lane
def test_feddc_is_the_authors_algorithm(lane: str) -> None:
    alpha = 0.3
    w, c = np.ones(WIDTH), np.zeros(WIDTH)
    drifts, mine = np.zeros((3, WIDTH)), np.zeros((3, WIDTH))
    algorithm = feddc(alpha=alpha, lr=rate(), batch_size=None, epochs=4, selection=Uniform(count=2))
    for one in trained(algorithm, 6, lane):
        ends, change = [], np.zeros(WIDTH)
        for k in one.chosen:
            end = local(k, w, 4, lambda y, k=k: alpha * (drifts[k] + y - w) + c - mine[k])  # noqa: B023
            plus = mine[k] - c + (w - end) / (4 * rate())
            change, mine[k], drifts[k] = change + plus - mine[k], plus, drifts[k] + end - w
            ends.append(end)
        w, c = np.mean(ends, axis=0) + drifts.mean(0), c + change / 3
        np.testing.assert_allclose(weights_of(one), w, rtol=0, atol=1e-11)


@pytest.mark.parametrize("selection", [None, Uniform(count=2)], ids=["everyone", "two of three"])
def test_feddyns_fixed_point_is_the_true_minimiser(selection: Uniform | None) -> None:
    options: dict[str, Any] = {} if selection is None else {"selection": selection}
    algorithm = feddyn(alpha=4.0, lr=rate(), batch_size=None, epochs=5, **options)
    assert np.linalg.norm(weights_of(trained(algorithm, 60)[-1]) - optimum()) < 1e-8


def test_feddcs_fixed_point_is_the_true_minimiser() -> None:
    algorithm = feddc(alpha=1.0, lr=rate(), batch_size=None, epochs=3)
    assert np.linalg.norm(weights_of(trained(algorithm, 80)[-1]) - optimum()) < 1e-8
