"""Clipped, noisy means against numbers worked out by hand; what one client can change; budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import tiny
import torch
from torch import Tensor

from consilience.algorithms.dp_fedavg import dp_fedavg
from consilience.core.exchange import Cohort
from consilience.core.rounds import TooFewClients, run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.environments.environment import Environment
from consilience.privacy import Spending, Spent, history
from consilience.server.averaging.steps.plain import MomentumStep
from consilience.server.rules.private_averaging import PrivateAveraging

QUIET = 1e-12  # of noise
KEY = bytes(range(32))


def model(a: list[float], b: float) -> Tree:
    return {"params": {"a": torch.tensor(a, dtype=torch.float64), "b": torch.tensor([b]).double()}, "buffers": {}}


def cohort(*models: Tree, round: int = 0, secret: bytes = KEY) -> Cohort:
    stacked: dict[str, Tensor] = {n: torch.stack([one["params"][n] for one in models]) for n in ("a", "b") if models}
    reply = {"model": {"params": stacked, "buffers": {}}} if models else {}
    ids = np.arange(len(models))
    return Cohort(reply=reply, ids=ids, examples=torch.ones(len(ids)), steps=ids + 1, round=round, secret=secret)


def moved(rule: PrivateAveraging, start: Tree, *models: Tree, clients: int = 4, **options: Any) -> Tree:
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
    nobody = cohort(round=3)
    state, notes = rule.update(rule.init(start, 10), nobody)
    found = rule.model(state)["params"]["w"]
    assert "weights" not in notes and float(found.std()) == pytest.approx(2.0 * 0.3 / 5, rel=0.02)
    assert abs(float(found.mean())) < 0.12 * 4 / 200
    again, _ = rule.update(rule.init(start, 10), nobody)
    assert torch.equal(rule.model(again)["params"]["w"], found), "the same key and the same sum have the same noise"
    assert scipy.stats.kstest(found.numpy() / 0.12, "norm").pvalue > 1e-3


def noise_of(rule: PrivateAveraging, start: Tree, *models: Tree, **options: Any) -> tuple[np.ndarray, str]:
    """The noise in bounds that was added to a sum, and the release's name."""
    state, notes = rule.update(rule.init(start, 4), cohort(*models, **options))
    quiet = moved(PrivateAveraging(bound=rule.bound, noise=QUIET), start, *models, **options)
    after = rule.model(state)["params"]
    gaps = [(after[name] - quiet[name]).flatten() * 4 / rule.bound for name in after]
    return torch.cat(gaps).numpy() / rule.noise, notes["release"]


WIDE = {"params": {"a": torch.zeros(3000).double(), "b": torch.zeros(1).double()}, "buffers": {}}


def shifted(by: float) -> Tree:
    return {"params": {"a": WIDE["params"]["a"] + by, "b": WIDE["params"]["b"]}, "buffers": {}}


@pytest.mark.parametrize(
    ("rule", "reply", "options"),
    [
        ({}, 0.001, {"secret": bytes(32)}),
        ({}, 0.001, {"round": 1}),
        ({}, 0.001 * (1 + 1e-12), {}),  # replies that differ in their last bits
        ({"noise": 2.0}, 0.001, {}),  # the same noise twice as large would give the sum away
        ({"bound": 0.5}, 0.001, {}),
    ],
)
def test_noise_is_another_if_anything_is(rule: dict[str, float], reply: float, options: dict[str, Any]) -> None:
    first, name = noise_of(PrivateAveraging(), WIDE, shifted(0.001))
    again, same = noise_of(PrivateAveraging(), WIDE, shifted(0.001))
    other, another = noise_of(PrivateAveraging(**rule), WIDE, shifted(reply), **options)
    assert np.array_equal(first, again) and name == same
    assert name != another and abs(np.corrcoef(first, other)[0, 1]) < 0.1


def test_without_a_key_nothing_is_released() -> None:
    rule, start = PrivateAveraging(), model([0.0, 0.0], 0.0)
    with pytest.raises(Invalid, match="secret"):
        rule.update(rule.init(start, 4), replace(cohort(start), secret=None))


def test_replies_lost_with_a_worker_stop_the_round() -> None:
    """One client's rows may have ended the process that held the others'."""
    rule, start = PrivateAveraging(), model([0.0, 0.0], 0.0)
    with pytest.raises(TooFewClients, match="round 1 is not released"):
        rule.update(rule.init(start, 4), replace(cohort(start), counts={"worker_lost": 2}))


def test_no_length_is_too_long_to_be_clipped() -> None:
    """1e300 squared is no number, and 1.7e308 minus its negative is none either: both count as nothing."""
    start, rule = model([-1.7e308, 0.0], 0.0), PrivateAveraging(noise=QUIET)
    sound = model([-1.7e308, 0.3], 0.4)
    for huge in (model([-1.7e308, 1e300], 0.0), model([1.7e308, 0.0], 0.0)):
        after = moved(rule, start, sound, huge, clients=1)
        assert float(after["a"][1]) == pytest.approx(0.3) and float(after["b"]) == pytest.approx(0.4)


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
    rounds = list(run(algorithm, engine, rounds=5, seed=3))  # not `Diverged`
    assert all(len(one.chosen) == 0 for one in rounds)
    assert tiny.gap(rounds[0].model, rounds[1].model) > 0


def test_useless_replies_do_not_end_a_run() -> None:
    """Whether it goes on would tell of the one client whose reply is not among them."""
    engine = tiny.engine(environment=Environment(communication=0.0))
    rounds = list(run(dp_fedavg(batch_size=4), engine, rounds=5))
    assert [len(one.cohort) for one in rounds] == [0] * 5 and all(len(one.chosen) for one in rounds)


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


def test_a_budget_counts_rounds_done_with_other_noise() -> None:
    """The state remembers what every round of its history cost."""
    pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")
    (done,) = run(dp_fedavg(noise=0.7, batch_size=4), tiny.engine(), rounds=1)
    spent = Spending(noise=0.7).epsilon(1)
    quiet = Spending(noise=5.0).epsilon(1, after=history([(0.7, 1.0)]))
    for budget, fits in ((spent, False), (quiet, True)):
        later = run(dp_fedavg(noise=5.0, epsilon=budget, batch_size=4), tiny.engine(), rounds=2, resume=done.snapshot)
        if fits:
            assert len(list(later)) == 1
        else:
            with pytest.raises(Spent, match="1 rounds fit"):
                next(later)


def test_two_runs_of_one_seed_share_no_noise_unless_asked_to() -> None:
    def gap(**options: int) -> float:
        one, other = (next(run(dp_fedavg(batch_size=4, **options), tiny.engine(), rounds=1)) for _ in range(2))
        assert tiny.same(one.cohort.reply, other.cohort.reply) and one.cohort.secret is None
        return tiny.gap(one.model, other.model)

    assert gap() > 0.1 and gap(noise_seed=3) == 0


def test_who_takes_part_is_as_secret_as_the_noise() -> None:
    def chosen(**options: int) -> list[int]:
        engine = tiny.engine(data=tiny.federation((1,) * 60))
        return next(run(dp_fedavg(rate=0.5, batch_size=4, **options), engine, rounds=1)).chosen.tolist()

    assert chosen() != chosen() and chosen(noise_seed=3) == chosen(noise_seed=3)


def test_it_learns_where_clients_are_many() -> None:
    federation = tiny.federation((12,) * 60)
    engine = tiny.engine(data=federation)
    algorithm = dp_fedavg(bound=1.0, noise=0.5, rate=1.0, lr=0.3, epochs=2, batch_size=4, noise_seed=0)
    losses = [float(one.cohort.reply["loss"].mean()) for one in run(algorithm, engine, rounds=12, seed=0)]
    assert losses[-1] < 0.8 * losses[0]
