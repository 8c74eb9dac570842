"""Clipped, noisy means against numbers worked out by hand; what one client can change; budgets."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from consilience.algorithms.dp_fedavg import dp_fedavg
from consilience.core.exchange import Cohort
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.privacy import Spent
from consilience.server.averaging.steps.momentum import MomentumStep
from consilience.server.rules.private_averaging import PrivateAveraging

QUIET = 1e-12  # of noise


def model(a: list[float], b: float) -> Tree:
    return {"params": {"a": torch.tensor(a, dtype=torch.float64), "b": torch.tensor([b]).double()}, "buffers": {}}


def cohort(*models: Tree, round: int = 0, seed: int = 0) -> Cohort:
    stacked: dict[str, Tensor] = {n: torch.stack([one["params"][n] for one in models]) for n in ("a", "b") if models}
    reply = {"model": {"params": stacked, "buffers": {}}} if models else {}
    ids = np.arange(len(models))
    return Cohort(reply=reply, ids=ids, examples=torch.ones(len(ids)), steps=ids + 1, round=round, seed=seed)


def moved(rule: PrivateAveraging, start: Tree, *models: Tree, clients: int = 4, **options: int) -> Tree:
    state, _ = rule.update(rule.init(start, clients), cohort(*models, **options))
    return rule.model(state)["params"]


def test_updates_are_clipped_as_a_whole_and_divided_by_the_expected_number() -> None:
    rule = PrivateAveraging(bound=1.0, noise=QUIET, rate=0.5)  # of four clients: two are expected
    start = model([1.0, 1.0], 1.0)
    # (3, 0, 4) has length 5 and becomes (0.6, 0, 0.8); (0, 0.5, 0) stays; 2 is the denominator whoever came
    after = moved(rule, start, model([4.0, 1.0], 5.0), model([1.0, 1.5], 1.0))
    torch.testing.assert_close(after["a"], torch.tensor([1.3, 1.25], dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(after["b"], torch.tensor([1.4], dtype=torch.float64), rtol=0, atol=1e-9)
    alone = moved(rule, start, model([4.0, 1.0], 5.0))
    torch.testing.assert_close(alone["a"], torch.tensor([1.3, 1.0], dtype=torch.float64), rtol=0, atol=1e-9)


def test_noise_has_the_deviation_it_should_have() -> None:
    start = {"params": {"w": torch.zeros(40_000, dtype=torch.float64)}, "buffers": {}}
    rule = PrivateAveraging(bound=0.3, noise=2.0, rate=0.5)
    nobody = Cohort(reply={}, ids=np.arange(0), examples=torch.ones(0), steps=np.arange(0), round=3, seed=1)
    state, notes = rule.update(rule.init(start, 10), nobody)
    found = rule.model(state)["params"]["w"]
    assert "weights" not in notes and float(found.std()) == pytest.approx(2.0 * 0.3 / 5, rel=0.02)
    assert abs(float(found.mean())) < 0.12 * 4 / 200
    again, _ = rule.update(rule.init(start, 10), nobody)
    assert torch.equal(rule.model(again)["params"]["w"], found), "the same round has the same noise"
    other, _ = rule.update(state, Cohort(**{**vars(nobody), "round": 4}))
    fresh = rule.model(other)["params"]["w"] - found
    assert abs(float(np.corrcoef(fresh.numpy(), found.numpy())[0, 1])) < 0.03


@pytest.mark.parametrize("seed", range(30))
def test_one_client_more_moves_the_sum_by_the_bound_at_most(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rule = PrivateAveraging(bound=0.7, noise=QUIET, rate=1.0)
    models = [model(list(draw.normal(0, 10.0**k, 2)), float(draw.normal(0, 10.0**k))) for k in draw.integers(-3, 4, 5)]
    start, clients = model(list(draw.normal(size=2)), 0.0), 5
    with_all, without = (moved(rule, start, *some, clients=clients) for some in (models, models[1:]))
    difference = torch.cat([with_all[name] - without[name] for name in ("a", "b")])
    assert float(difference.norm()) * clients <= 0.7 * (1 + 1e-6)


def test_a_server_step_only_sees_the_noisy_mean() -> None:
    start, reply = model([0.0, 0.0], 0.0), model([0.3, 0.0], 0.4)
    plain = moved(PrivateAveraging(noise=0.5), start, reply, clients=1)
    pushed = moved(PrivateAveraging(noise=0.5, step=MomentumStep(lr=2.0, beta=0.0)), start, reply, clients=1)
    for name in plain:
        torch.testing.assert_close(pushed[name], 2 * plain[name], rtol=1e-12, atol=0)


def test_a_round_without_clients_moves_the_model_too() -> None:
    engine, algorithm = tiny.engine(), dp_fedavg(rate=1e-9, noise=1.0, lr=0.1, batch_size=4)
    rounds = list(run(algorithm, engine, rounds=5, seed=3))  # not `Diverged`: nobody was asked
    assert all(len(one.chosen) == 0 for one in rounds)
    assert tiny.gap(rounds[0].model, rounds[1].model) > 0


def test_statistics_of_the_data_are_refused() -> None:
    with pytest.raises(Invalid, match="without batch norm"):
        next(run(dp_fedavg(), tiny.engine(tiny.convnet), rounds=1))


def test_a_budget_is_never_exceeded() -> None:
    pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")
    algorithm = dp_fedavg(noise=2.0, rate=0.5, epsilon=2.5, lr=0.1, batch_size=4)
    server = algorithm.server
    assert isinstance(server, PrivateAveraging)
    fits = server.spending.rounds_within(2.5)
    rounds, done = run(algorithm, tiny.engine(), rounds=fits + 5, seed=1, max_bad_rounds=99), 0
    with pytest.raises(Spent, match=f"{fits} rounds fit"):
        for _ in rounds:
            done += 1
    assert done == fits >= 2


def test_it_learns_where_clients_are_many() -> None:
    federation = tiny.federation((12,) * 60)
    engine = tiny.engine(data=federation)
    algorithm = dp_fedavg(bound=1.0, noise=0.5, rate=1.0, lr=0.3, epochs=2, batch_size=4)
    losses = [float(one.cohort.reply["loss"].mean()) for one in run(algorithm, engine, rounds=12, seed=0)]
    assert losses[-1] < 0.8 * losses[0]
