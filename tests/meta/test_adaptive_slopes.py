"""Adaptive servers: the slope of m / (sqrt(v) + tau) where nothing ever moves, and learning for every such server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import consilience as cs
from consilience.cli import app
from consilience.core.federation import Federation
from consilience.meta import Schedule
from consilience.meta.slopes import slope_of, unfolded_loss
from consilience.server.averaging.steps.adaptive import AdagradStep, AdamStep, YogiStep, _root

pytestmark = pytest.mark.usefixtures("untraced")
ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")
STEPS = (AdagradStep(), AdagradStep(beta1=0.5), AdamStep(), YogiStep())


def with_a_dead_pixel(start: float = 0.0) -> cs.Vectorised:
    """Three clients whose last input is always 0, so that its weights never move; they begin at `start`."""
    draw = torch.Generator().manual_seed(3)
    clients = []
    for rows in (6, 9, 4):
        x = torch.randn(rows, 4, generator=draw, dtype=torch.float64)
        x[:, 3] = 0
        clients.append((x, (x[:, 0] > 0).long()))
    module = tiny.seeded(lambda: nn.Linear(4, 2, dtype=torch.float64))
    with torch.no_grad():
        module.weight[:, 3] = start
    data = Federation.from_clients(clients)
    return cs.Vectorised(cs.Task(module), data, device="cpu", dtype="float64", lane="serial")


@pytest.mark.parametrize("recipe", ADAPTIVE)
@pytest.mark.parametrize("start", [0.0, 0.25])
def test_slopes_equal_finite_differences_where_entries_never_move(recipe: str, start: float) -> None:
    engine = with_a_dead_pixel(start)
    algorithm = getattr(cs, recipe)(lr=0.1, batch_size=4, server_lr=0.1)
    table = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]], dtype=torch.float64)  # sums without rounding

    def loss(changed: Tensor) -> float:
        return float(unfolded_loss(algorithm, engine, engine.start(), changed, 3, detach=False))

    _, found = slope_of("full", algorithm, engine, engine.start())(table, 3)
    assert bool(found.isfinite().all()) and float(found.abs().max()) > 1e-3
    for at in np.ndindex(2, 3):
        change = torch.zeros_like(table)
        change[at] = 1e-7
        numeric = (loss(table + change) - loss(table - change)) / 2e-7
        assert float(found[at]) == pytest.approx(numeric, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_the_slope_of_a_step_at_an_entry_that_did_not_move(step: Any) -> None:
    """From zero moments, d -> w + lr (1 - beta1) d / (c |d| + tau) has the slope lr (1 - beta1) / tau at d = 0."""
    params = {"w": torch.tensor([0.5, 0.5], dtype=torch.float64)}
    merged = {"w": torch.tensor([0.5, 0.7], dtype=torch.float64).requires_grad_()}
    moved, _ = step.move(params, merged, step.init(params))
    (slope,) = torch.autograd.grad(moved["w"].sum(), merged["w"])
    assert float(slope[0]) == pytest.approx(step.lr * (1 - step.beta1) / step.tau, rel=1e-12)
    for at in (0, 1):
        change = torch.zeros(2, dtype=torch.float64)
        change[at] = 1e-8
        up, down = (
            step.move(params, {"w": merged["w"].detach() + sign * change}, step.init(params))[0]["w"].sum()
            for sign in (1, -1)
        )
        assert float(slope[at]) == pytest.approx(float(up - down) / 2e-8, rel=1e-4)


def test_the_root_is_the_square_root_to_the_bit() -> None:
    tiny_, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    values = torch.tensor([0.0, -0.0, tiny_, tiny_ / 8, 2.0, huge, torch.inf, torch.nan, -1.0])
    assert torch.equal(_root(values).nan_to_num(nan=7.0), values.sqrt().nan_to_num(nan=7.0))
    assert _root(values).isnan().tolist() == values.sqrt().isnan().tolist()


@pytest.mark.parametrize("recipe", ADAPTIVE)
def test_learn_works_for_adaptive_servers_on_digits(recipe: str, tmp_path: Path) -> None:
    """Digits have pixels that are 0 in every picture."""
    out = tmp_path / "weights.safetensors"
    small = ["rounds=2", "model=logistic", "partition.clients=3", "engine.lane=serial", f"algorithm={recipe}"]
    options = ["--iterations", "3", "--lr", "0.01", "--out", str(out), "--quiet"]
    done = CliRunner().invoke(app, ["learn", *small, "algorithm.epochs=0.3", *options])
    assert done.exit_code == 0, done.output
    weights = Schedule.load(out).weights
    assert weights.shape == (2, 3) and bool(weights.isfinite().all())
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-12)
