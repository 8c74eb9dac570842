"""Where learning starts, what it makes small, and which rows of the table cannot matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor

import consilience as cs
from consilience.core import rng
from consilience.core.settings import Invalid
from consilience.environments.environment import Environment
from consilience.meta import learning, simplex
from consilience.meta.initial import LEAST, initial_table
from consilience.meta.learning import learned
from consilience.meta.slopes import slope_of, unfolded_loss
from consilience.selection import Uniform
from consilience.server import SimProxWeights, UniformWeights

pytestmark = pytest.mark.usefixtures("untraced")
LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 4}


def first_table(initial: Any, *, rounds: int = 3, **options: Any) -> Tensor:
    engine = tiny.engine(tiny.mlp)
    algorithm = cs.fedavg(**LOCAL, **options)
    return initial_table(initial, algorithm, engine, engine.start(), rounds=rounds, seed=0)


def test_given_tables_are_where_learning_starts() -> None:
    row = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
    np.testing.assert_allclose(first_table(row), row.repeat(3, 1), rtol=1e-12)
    table = torch.stack([row, row.flip(0)])
    # two rows for three rounds: the third has their mean, as when the table is used
    np.testing.assert_allclose(first_table(table), torch.stack([row, row.flip(0), table.mean(0)]), rtol=1e-12)
    for constraint in ("square", "softmax", "raw"):
        steps = learning(
            cs.fedavg(**LOCAL), tiny.engine(), rounds=2, iterations=1, lr=1e-9, initial=table, constraint=constraint
        )
        np.testing.assert_allclose(next(steps).weights, table, atol=1e-7)


def test_a_weight_of_zero_can_grow() -> None:
    table = first_table(torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64))
    np.testing.assert_allclose(table[0, 2:], LEAST, rtol=1e-3)
    theta = simplex.free(table, "square").requires_grad_()
    simplex.weights(theta, "square")[0, 2].backward()
    assert float(theta.grad[0, 2]) > 0


def test_what_a_weighting_computes_in_a_run() -> None:
    """SimProx's weights of every round, in a run with SimProx's weights and the luck of `initial weights`."""
    engine, weighting = tiny.engine(tiny.mlp), SimProxWeights()
    seed = rng.key(0, "initial weights") % 2**63
    by_simprox = cs.fedavg(weighting=weighting, **LOCAL)
    expected = torch.stack([done.notes["weights"] for done in cs.run(by_simprox, engine, rounds=3, seed=seed)])
    found = first_table(weighting)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert float((found - first_table(None)).abs().max()) > 0.01
    np.testing.assert_allclose(first_table(UniformWeights()), 0.2, rtol=1e-12)


def test_who_is_absent_has_its_share_of_the_rows() -> None:
    table = first_table(UniformWeights(), selection=Uniform(count=2))
    shares = np.array(tiny.SIZES) / sum(tiny.SIZES)
    for row in table.numpy():
        there = ~np.isclose(row, shares)
        assert there.sum() <= 2 and row.sum() == pytest.approx(1)
        if there.sum() == 2:
            assert row[there][0] == pytest.approx(row[there][1])


@pytest.mark.parametrize(
    ("initial", "message"),
    [
        (torch.full((4,), 0.25), "the schedule is for 4 clients, but there are 5"),
        (torch.tensor([1.0, 0.5, -0.5, 0.0, 0.0]), "weights of at least 0"),
        (torch.zeros(5), "not all of them 0"),
    ],
)
def test_tables_that_cannot_be_a_start(initial: Tensor, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        first_table(initial)


# --- the squared error as what the weights make small (S4-5) ---------------------------------------------------------


@pytest.mark.parametrize("loss", ["squared_error", "squared_error_logits"])
def test_squared_errors_against_one_hot_labels(loss: Any) -> None:
    """The value by hand at the start model; the three ways to the gradient agree; clients still train on their loss."""
    engine = tiny.engine(tiny.mlp, environment=Environment(communication=0.6, silent="broadcast_model"))
    algorithm, start = cs.fedavg(lr=0.1, batch_size=None), engine.start()
    table = first_table(None, rounds=2)
    reported, graph = (slope_of(way, algorithm, engine, start, loss=loss)(table, 4) for way in ("reported", "autograd"))
    np.testing.assert_allclose(reported[1], graph[1], rtol=1e-9, atol=1e-12)
    assert reported[0] == pytest.approx(graph[0], rel=1e-10)
    dead = tiny.engine(tiny.mlp, environment=Environment(communication=0.0, silent="broadcast_model"))
    found = float(unfolded_loss(algorithm, dead, start, table, 4, detach=True, loss=loss))
    by_hand = 0.0
    for k in range(5):
        x, y = dead.store("train").of(k)
        output, _ = dead.task.apply(start, x, train=False)
        given = output.softmax(1) if loss == "squared_error" else output
        by_hand += float(F.mse_loss(given, F.one_hot(y, 3).double()))
    assert found == pytest.approx(3 * by_hand, rel=1e-12)  # two rounds and the terminal pass, nobody moves
    (step,) = learning(cs.fedavg(**LOCAL), tiny.engine(), rounds=1, iterations=1, loss=loss)
    assert step.gradient == "reported"


def test_a_squared_error_needs_reports_and_classes() -> None:
    with pytest.raises(Invalid, match="not those of loss = 'squared_error'; what can: reported, autograd, full"):
        list(
            learning(cs.fedavg(**LOCAL), tiny.engine(), rounds=1, iterations=1, loss="squared_error", gradient="server")
        )
    data = cs.Federation.from_clients([(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(2)])
    task = cs.Task(torch.nn.Linear(2, 1), loss="squared_error")
    engine = cs.Vectorised(task, data, device="cpu", lane="serial")
    with pytest.raises(Invalid, match="compares with one-hot labels, but the task is regression"):
        list(learning(cs.fedavg(), engine, rounds=1, iterations=1, loss="squared_error"))


# --- rows that cannot matter -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["simfedswap", "fedma"])
def test_pairs_and_matches_are_chosen_from_models_that_carry_gradients(recipe: str) -> None:
    """After a first average the clients' models depend on the table: who is swapped is a choice."""
    algorithm = getattr(cs, recipe)(**LOCAL)
    engine = tiny.engine(tiny.mlp)
    (step,) = learning(algorithm, engine, rounds=5, iterations=1, lr=0.05)
    assert torch.isfinite(step.slope).all() and step.slope[2].abs().max() > 0  # an average in round 3


def test_rounds_that_only_swap_are_named(tmp_path: Path) -> None:
    engine = tiny.engine(tiny.mlp)
    with pytest.warns(UserWarning, match=r"^rounds 1, 2, 4: no loss depends on these weights"):
        schedule = cs.learn_schedule(cs.fedswap(**LOCAL), engine, rounds=5, iterations=2, lr=0.05, progress=False)
    assert schedule.idle_rounds == (1, 2, 4)  # an average in round 3, and the last model is an average in any case
    shares = torch.tensor(tiny.SIZES, dtype=torch.float64) / sum(tiny.SIZES)
    np.testing.assert_allclose(schedule.weights[[0, 1, 3]], shares.repeat(3, 1), rtol=1e-12)
    assert float((schedule.weights[2] - shares).abs().max()) > 1e-3
    plain = learned(learning(cs.fedavg(**LOCAL), engine, rounds=2, iterations=1))
    assert plain.idle_rounds == () and plain.note() == ""


@pytest.mark.parametrize("recipe", ["feddyn", "feddc", "qffl"])
def test_ledgers_that_move_the_model_are_met_in_the_first_run(recipe: str) -> None:
    (step,) = learning(getattr(cs, recipe)(**LOCAL), tiny.engine(), rounds=2, iterations=1)
    assert step.gradient == "autograd" and bool(step.slope.isfinite().all()) and float(step.slope.abs().max()) > 0
    with pytest.raises(Invalid, match="move the model away from the weighted mean"):
        list(learning(getattr(cs, recipe)(**LOCAL), tiny.engine(), rounds=2, iterations=1, gradient="reported"))


@pytest.mark.parametrize("recipe", ["ditto", "fedgen"])
def test_wrapped_training_reports_the_gradients_of_what_it_sends(recipe: str) -> None:
    engine, algorithm = tiny.engine(), getattr(cs, recipe)(**LOCAL)
    table = first_table(None, rounds=2)
    ways = [slope_of(way, algorithm, engine, engine.start())(table, 2)[1] for way in ("reported", "autograd")]
    np.testing.assert_allclose(*ways, rtol=1e-9, atol=1e-9)


def test_what_pytorch_cannot_differentiate_is_refused() -> None:
    with pytest.raises(Invalid, match="cannot be differentiated by PyTorch"):
        list(learning(cs.geometric_median(**LOCAL), tiny.engine(), rounds=2, iterations=1))
