"""Clients whose replies are lost: their losses count (Algorithm 3, line 8), and luck is drawn anew in every run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor

import consilience as cs
from consilience.core import plans
from consilience.environments.environment import Environment
from consilience.meta import learning
from consilience.meta.slopes import slope_of

pytestmark = pytest.mark.usefixtures("untraced")
LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 4, "epochs": 2}
ROUNDS, CLIENTS = 4, 5
LOST = Environment(communication=(0.2, 0.5, 0.6, 0.5, 0.4), silent="broadcast_model")


def plain_autograd(
    engine: Any, environment: Environment, table: Tensor, seed: int, *, scaled: bool = False, all_losses: bool = True
) -> Any:
    """(loss, dLoss/dTheta, who was heard [T, K]) in plain PyTorch: no engine, server, client rule or adjoint of ours.

    Only the luck is the engine's: which rows are in a batch, and whose reply arrives. `scaled`: Algorithm 5.
    `all_losses`: also those of silent clients.
    """
    table = table.clone().requires_grad_()
    start, store = engine.start()["params"], engine.store("train")
    work, rows = cs.fedavg(**LOCAL).client.work, np.array(tiny.SIZES)
    names = list(start)
    model, total, heard_in = dict(start), torch.zeros((), dtype=torch.float64), []
    for t in range(ROUNDS + 1):
        heard = environment.reachable(t, np.arange(CLIENTS), seed)
        epochs = np.array(environment.epochs or [2] * CLIENTS)
        steps = (epochs * np.ceil(rows / 4)).astype(int)
        effective = float((rows / rows.sum() * np.where(heard, steps, 0)).sum())
        trained = []
        for k in range(CLIENTS):
            own = dict(model)
            plan = plans.draw(work, store, np.array([k]), steps[k : k + 1], seed=seed, round=t)
            for s in range(steps[k]):
                batch = plan.single(s, 0, store)
                hidden = torch.tanh(batch.x.flatten(1) @ own[names[0]].T + own[names[1]])
                loss = F.cross_entropy(hidden @ own[names[2]].T + own[names[3]], batch.y)
                total = total + loss if all_losses or heard[k] else total
                if heard[k] and t < ROUNDS:  # a constant step: gradients go straight through to the model before it
                    free = [own[name].detach().requires_grad_() for name in names]
                    again = torch.tanh(batch.x.flatten(1) @ free[0].T + free[1]) @ free[2].T + free[3]
                    found = torch.autograd.grad(F.cross_entropy(again, batch.y), free)
                    rate = 0.1 * (effective / steps[k] if scaled else 1.0)
                    own = {name: own[name] - rate * g for name, g in zip(names, found)}
            trained.append(own)
        if t == ROUNDS:
            break
        heard_in.append(heard)
        there = np.arange(CLIENTS) if environment.silent == "broadcast_model" else np.flatnonzero(heard)
        if len(there):
            share = table[t, there] / table[t, there].sum() * table[t].sum()
            model = {name: sum(share[i] * trained[k][name] for i, k in enumerate(there)) for name in names}
    (slope,) = torch.autograd.grad(total, table)
    return float(total.detach()), slope, np.array(heard_in)


def some_table() -> Tensor:
    raw = torch.rand(ROUNDS, CLIENTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    return raw / raw.sum(1, keepdim=True)


@pytest.mark.parametrize("silent", ["broadcast_model", "renormalise"])
@pytest.mark.parametrize("epochs", [None, (1, 3, 2, 1, 2)])
@pytest.mark.parametrize("recipe", [cs.duw_fedavg, cs.duw_fednova])
def test_gradients_equal_plain_autograd_with_silent_clients(recipe: Any, epochs: Any, silent: Any) -> None:
    environment = replace(LOST, silent=silent, epochs=epochs)
    engine, algorithm, table, seed = tiny.engine(tiny.mlp, environment=environment), recipe(**LOCAL), some_table(), 5
    loss, expected, heard = plain_autograd(engine, environment, table, seed, scaled=recipe is cs.duw_fednova)
    assert 0 < heard.sum() < heard.size and not environment.reachable(ROUNDS, np.arange(CLIENTS), seed).all()
    for way in ("server", "reported", "autograd"):
        found_loss, found = slope_of(way, algorithm, engine, engine.start())(table, seed)
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
        if way != "server":  # the server knows mean losses alone: a last batch that is smaller counts for less there
            assert found_loss == pytest.approx(loss, rel=1e-10)
    _, again = slope_of("server", algorithm, engine, engine.start(), keep="nothing")(table, seed)
    np.testing.assert_allclose(again, expected, rtol=1e-9, atol=1e-9)


def test_without_the_losses_of_silent_clients_the_gradient_would_be_another() -> None:
    engine, table = tiny.engine(tiny.mlp, environment=LOST), some_table()
    _, right, _ = plain_autograd(engine, LOST, table, 5)
    _, other, _ = plain_autograd(engine, LOST, table, 5, all_losses=False)
    assert float((right - other).norm() / right.norm()) > 0.1
    for way in ("server", "autograd"):
        _, found = slope_of(way, cs.duw_fedavg(**LOCAL), engine, engine.start())(table, 5)
        assert float((found - right).norm() / right.norm()) < 1e-10


def iterations(environment: Environment, **options: Any) -> list[float]:
    """Losses of four unfolded runs whose weights stay where they are."""
    local = {**LOCAL, **options}
    engine = tiny.engine(tiny.mlp, environment=environment)
    return [step.loss for step in learning(cs.fedavg(**local), engine, rounds=2, iterations=4, lr=1e-12)]


def test_failures_are_redrawn_in_every_unfolded_run() -> None:
    """S4-8. Full batches are the same rows in every run, so that only failures can make the losses differ."""
    still = iterations(Environment(), batch_size=None)
    np.testing.assert_allclose(still, still[0], rtol=1e-10)
    drawn = iterations(Environment(communication=0.5, silent="broadcast_model"), batch_size=None)
    assert len({round(loss, 6) for loss in drawn}) == 4


def test_batches_are_redrawn_in_every_unfolded_run() -> None:
    """Without failures, only batches can make the losses differ; they do in rounds, and in the terminal pass."""
    assert len({round(loss, 6) for loss in iterations(Environment())}) == 4


def test_luck_of_every_run_as_the_engine_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run repeats the seed of another; rounds and terminal pass share their run's."""
    engine = tiny.engine(tiny.mlp, environment=LOST)
    met: list[tuple[int, int, tuple[int, ...]]] = []
    plain = engine.exchange

    def spying(client: Any, channel: Any, broadcast: Any, ids: Any, *, round: int, seed: int) -> Any:
        cohort = plain(client, channel, broadcast, ids, round=round, seed=seed)
        if not client.work.reliable:
            met.append((seed, round, tuple(cohort.ids[cohort.heard].tolist())))
        return cohort

    monkeypatch.setattr(engine, "exchange", spying)
    list(learning(cs.fedavg(**LOCAL), engine, rounds=3, iterations=4, lr=0.01))
    assert [round for _, round, _ in met] == [0, 1, 2] * 4
    assert len({seed for seed, _, _ in met}) == 4
    assert len({tuple(heard for _, _, heard in met[3 * m : 3 * m + 3]) for m in range(4)}) == 4
