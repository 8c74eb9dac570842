"""FedProx's gamma: how inexactly a client solved its subproblem."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn

from consilience.algorithms.fedprox import fedprox
from consilience.channel import Quantise
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")


class Line(nn.Module):
    """y = w x, w = 1 at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_gamma_of_gradient_descent_on_a_parabola(lane: Any) -> None:
    """h(w) = mean (w x - y)^2 + mu/2 (w - 1)^2 has slope (S + mu)(w - w*); T steps leave |1 - r (S + mu)|^T of it."""
    clients = [(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0])), (torch.tensor([1.0]), torch.tensor([-1.0]))]
    world = Environment(steps=(3, 7))
    task = Task(Line(), loss="squared_error")
    engine = Vectorised(
        task, Federation.from_clients(clients), device="cpu", dtype="float64", lane=lane, environment=world
    )
    (one,) = run(fedprox(mu=0.5, lr=0.1, batch_size=None, report_gamma=True), engine, rounds=1)
    # mean x^2 is 2.5 and 1: S = 5 and 2
    assert one.cohort.reply["gamma"].tolist() == pytest.approx([(1 - 0.55) ** 3, (1 - 0.25) ** 7], rel=1e-12)


def full_slope(task: Task, model: Any, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """The gradient of the mean loss over all rows, by ordinary autograd on a module of its own."""
    module = tiny.mlp().to(torch.float64)
    module.load_state_dict(model["params"])
    torch.nn.functional.cross_entropy(module(x), y).backward()
    return np.concatenate([p.grad.numpy().ravel() for p in module.parameters()])


def test_gamma_is_measured_on_all_rows_whatever_the_batches() -> None:
    mu = 0.3
    engine = tiny.engine(tiny.mlp, environment=Environment(steps=(4, 0, 2, 9, 1)))
    before = engine.start()
    for one in run(fedprox(mu=mu, lr=0.05, batch_size=4, report_gamma=True), engine, rounds=2, seed=1):
        for k, gamma in enumerate(one.cohort.reply["gamma"].tolist()):
            x, y = engine.federation.train.of(k)
            trained = {"params": {n: v[k] for n, v in one.cohort.reply["model"]["params"].items()}}
            move = np.concatenate([(trained["params"][n] - w).numpy().ravel() for n, w in before["params"].items()])
            after = full_slope(engine.task, trained, x, y) + mu * move
            expected = np.linalg.norm(after) / np.linalg.norm(full_slope(engine.task, before, x, y))
            assert gamma == pytest.approx(expected, rel=1e-9)
        assert one.cohort.reply["gamma"][1] == 1  # no step: the model is where it was
        before = one.model


def test_more_work_is_less_inexact_and_the_report_changes_nothing_else() -> None:
    gammas = []
    for epochs in (1, 4, 32):
        options: dict[str, Any] = {"mu": 1.0, "lr": 0.2, "batch_size": None, "epochs": epochs}
        (one,) = run(fedprox(report_gamma=True, **options), tiny.engine(), rounds=1)
        (plain,) = run(fedprox(**options), tiny.engine(), rounds=1)
        assert tiny.same(one.model, plain.model)
        assert "gamma" not in plain.cohort.reply
        assert one.bytes_up == plain.bytes_up + 5 * 8 and one.bytes_down == plain.bytes_down
        gammas.append(one.cohort.reply["gamma"])
    assert bool((gammas[0] > gammas[1]).all() and (gammas[1] > gammas[2]).all())
    assert float(gammas[2].max()) < 0.05


def test_behind_a_channel_it_is_the_gamma_of_what_arrived() -> None:
    options: dict[str, Any] = {"mu": 1.0, "lr": 0.2, "batch_size": None, "epochs": 32, "report_gamma": True}
    (clean,) = run(fedprox(**options), tiny.engine(tiny.convnet), rounds=1)
    (coarse,) = run(fedprox(channel=Quantise(bits=2), **options), tiny.engine(tiny.convnet), rounds=1)
    assert tiny.finite({"g": clean.cohort.reply["gamma"]})
    assert float(coarse.cohort.reply["gamma"].mean()) > float(clean.cohort.reply["gamma"].mean())
