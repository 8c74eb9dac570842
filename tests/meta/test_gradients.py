"""Every way to dLoss/dTheta gives the same number, and it is the right one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn

import consilience as cs
from consilience.core import plans, rng
from consilience.core.algorithm import Algorithm
from consilience.core.federation import Federation
from consilience.environments.environment import Environment
from consilience.meta import learning
from consilience.meta.slopes import slope_of, unfolded_loss

pytestmark = pytest.mark.usefixtures("untraced")
UNEVEN = Environment(steps=(5, 0, 1, 2, 9), communication=0.7, silent="broadcast_model")
LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 4}


def slope(algorithm: Algorithm, engine: Any, way: Any, table: Tensor, *, seed: int = 3, keep: Any = "device") -> Tensor:
    """dLoss/dTheta of one unfolded run."""
    return slope_of(way, algorithm, engine, engine.start(), keep=keep)(table, seed)[1]


def some_table(rounds: int = 3, clients: int = 5, *, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    raw = torch.rand(rounds, clients, generator=draw, dtype=torch.float64) + 0.1
    return raw / raw.sum(1, keepdim=True)


@pytest.mark.parametrize("environment", [Environment(), UNEVEN, replace(UNEVEN, silent="renormalise")], ids=str)
@pytest.mark.parametrize("recipe", [cs.fedavg, cs.duw_fedavg, cs.duw_fednova])
def test_server_only_equals_autograd(recipe: Any, environment: Environment) -> None:
    engine = tiny.engine(tiny.mlp, environment=environment)
    algorithm, table = recipe(**LOCAL), some_table()
    expected = slope(algorithm, engine, "autograd", table)
    assert float(expected.abs().max()) > 0.1
    for way in ("server", "reported"):
        np.testing.assert_allclose(slope(algorithm, engine, way, table), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("keep", ["cpu", "nothing"])
def test_where_models_wait_does_not_matter(keep: str) -> None:
    engine, table = tiny.engine(tiny.mlp, environment=UNEVEN), 0.8 * some_table(4)  # raw weights need not sum to one
    algorithm = cs.fedavg(lr_decay=0.9, **LOCAL)
    expected = slope(algorithm, engine, "server", table)
    np.testing.assert_allclose(slope(algorithm, engine, "server", table, keep=keep), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(slope(algorithm, engine, "autograd", table), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedprox", {"mu": 0.5}), ("scaffold", {}), ("fedavg", {"momentum": 0.5, "weight_decay": 0.1})],
)
def test_reported_gradients_equal_autograd_where_models_do_not_tell(name: str, options: dict[str, Any]) -> None:
    engine, table = tiny.engine(tiny.mlp, environment=UNEVEN), some_table()
    algorithm = getattr(cs, name)(**LOCAL, **options)
    expected = slope(algorithm, engine, "autograd", table)
    np.testing.assert_allclose(slope(algorithm, engine, "reported", table), expected, rtol=1e-9, atol=1e-9)


def test_full_is_the_true_gradient_by_finite_differences() -> None:
    engine, table = tiny.engine(tiny.mlp), some_table(2)
    algorithm, start = cs.fedavg(**LOCAL), engine.start()

    def loss(changed: Tensor) -> float:
        return float(unfolded_loss(algorithm, engine, start, changed, 3, detach=False))

    found = slope(algorithm, engine, "full", table)
    for at in np.ndindex(2, 5):
        change = torch.zeros_like(table)
        change[at] = 1e-5
        assert float(found[at]) == pytest.approx((loss(table + change) - loss(table - change)) / 2e-5, rel=1e-6)


def test_first_order_and_full_agree_in_the_last_round_alone() -> None:
    engine, table, algorithm = tiny.engine(tiny.mlp), some_table(3), cs.fedavg(**LOCAL)
    first, full = (slope(algorithm, engine, way, table) for way in ("autograd", "full"))
    np.testing.assert_allclose(first[-1], full[-1], rtol=1e-9, atol=1e-9)
    assert float((first[0] - full[0]).abs().max()) > 1e-3


def test_batch_norm_dropout_and_other_lanes() -> None:
    engine, table, algorithm = tiny.engine(tiny.convnet, environment=UNEVEN), some_table(2), cs.fedavg(**LOCAL)
    expected = slope(algorithm, engine, "autograd", table)
    np.testing.assert_allclose(slope(algorithm, engine, "server", table), expected, rtol=1e-9, atol=1e-9)
    batched = tiny.engine(tiny.convnet, environment=UNEVEN, lane="batched")
    np.testing.assert_allclose(slope(algorithm, batched, "server", table), expected, rtol=1e-9, atol=1e-9)


def by_hand(rows: list[tuple[np.ndarray, np.ndarray]], w: np.ndarray, table: np.ndarray, lr: float) -> np.ndarray:
    """Least squares, one full batch a round: S4-10's recursion written out for a linear model, in plain numpy."""

    def gradient(k: int, at: np.ndarray) -> np.ndarray:
        x, y = rows[k]
        return 2 * x.T @ (x @ at - y) / len(y)

    before, models = [], []
    for weights in table:
        before.append(w)
        models.append([w - lr * gradient(k, w) for k in range(len(rows))])
        w = sum(share * model for share, model in zip(weights, models[-1]))
    after = sum(gradient(k, w) for k in range(len(rows)))
    found = np.zeros_like(table)
    for t in reversed(range(len(table))):
        found[t] = [after @ model for model in models[t]]
        after = sum(gradient(k, before[t]) + table[t, k] * after for k in range(len(rows)))
    return found


def test_a_linear_model_by_hand() -> None:
    draw = np.random.default_rng(0)
    rows = [(draw.normal(size=(n, 3)), draw.normal(size=n)) for n in (4, 2, 5)]
    clients = [(torch.from_numpy(x), torch.from_numpy(y[:, None])) for x, y in rows]
    data = Federation.from_clients(clients)

    def line() -> nn.Module:
        return tiny.seeded(lambda: nn.Linear(3, 1, bias=False, dtype=torch.float64))

    engine = cs.Vectorised(cs.Task(line(), loss="squared_error"), data, device="cpu", dtype="float64", lane="serial")
    table = some_table(3, 3)
    start = engine.start()["params"]["weight"][0].numpy()
    algorithm = cs.fedavg(lr=0.05, batch_size=None)
    expected = by_hand(rows, start, table.numpy(), 0.05)
    for way in ("server", "reported", "autograd"):
        np.testing.assert_allclose(slope(algorithm, engine, way, table), expected, rtol=1e-10, atol=1e-12)


def test_the_last_round_would_have_no_gradient_without_the_terminal_pass() -> None:
    """S4-3: Theta^(T-1) reaches only the terminal losses, so its slope is theirs alone."""
    engine, table, algorithm = tiny.engine(tiny.mlp), some_table(1), cs.fedavg(**LOCAL)
    start = engine.start()
    found = slope(algorithm, engine, "server", table, seed=7)

    def terminal(changed: Tensor) -> float:
        model = cs.run(
            replace(algorithm, server=replace(algorithm.server, weighting=cs.ScheduleWeights.of(changed))),
            engine,
            rounds=1,
            seed=7,
            start=start,
        )
        params = next(iter(model)).model
        store, work = engine.store("train"), algorithm.client.work
        total = 0.0
        for k in range(5):
            steps = work.steps_per_epoch(np.array([tiny.SIZES[k]]))
            plan = plans.draw(work, store, np.array([k]), steps, seed=7, round=1)
            for s in range(int(steps[0])):
                batch = plan.single(s, 0, store)
                output, _ = engine.task.apply(params, batch.x, train=True)
                total += float(nn.functional.cross_entropy(output, batch.y))
        return total

    for k in range(5):
        change = torch.zeros_like(table)
        change[0, k] = 1e-5
        numeric = (terminal(table + change) - terminal(table - change)) / 2e-5
        assert float(found[0, k]) == pytest.approx(numeric, rel=1e-6)


def test_seeds_differ_between_iterations_and_repeat_between_runs() -> None:
    engine = tiny.engine(tiny.mlp, environment=UNEVEN)
    runs = [list(learning(cs.fedavg(**LOCAL), engine, rounds=2, iterations=3, lr=1e-12)) for _ in range(2)]
    losses = [[step.loss for step in one] for one in runs]
    assert losses[0] == losses[1] and len(set(losses[0])) == 3  # failures and batches are drawn afresh
    assert rng.key(0, "unfolding", 0) != rng.key(0, "unfolding", 1)


def test_a_whole_small_resnet() -> None:
    """Impossible with the authors' graph at scale: every parameter of a convolutional network with batch norm."""
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(6, 3, 8, 8, generator=draw), torch.randint(0, 3, (6,), generator=draw)) for _ in range(3)]
    module = cs.build_model("resnet20", (3, 8, 8), 3, seed=0)
    engine = cs.Vectorised(cs.Task(module), Federation.from_clients(clients), device="cpu", lane="serial")
    steps = list(learning(cs.fedavg(lr=0.01, batch_size=3), engine, rounds=2, iterations=1, lr=0.01))
    assert steps[-1].gradient == "server" and bool(steps[-1].weights.isfinite().all())
    assert float((steps[-1].weights - 1 / 3).abs().max()) > 1e-3
