"""Models of one's own: Ditto, FedAMP, and how good they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn

from consilience.algorithms.ditto import ditto
from consilience.algorithms.fedamp import fedamp
from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.fedper import fedper
from consilience.core import plans, tree
from consilience.core.plans import Work
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.experiments.client_tests import personal_test
from consilience.selection import Uniform
from consilience.server import UniformWeights
from consilience.server.rules.message_passing import MessagePassing
from consilience.training import train

pytestmark = pytest.mark.usefixtures("untraced")


# --- Ditto -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_dittos_global_model_is_fedavgs(lane: str) -> None:
    """The personal models do not touch it."""
    one, other = (
        list(run(recipe(batch_size=4, lr=0.1), tiny.engine(tiny.convnet, lane=lane), rounds=3, seed=1))[-1]
        for recipe in (ditto, fedavg)
    )
    assert tiny.same(one.model, other.model)
    assert one.bytes_up == other.bytes_up


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_dittos_personal_model_by_hand(lane: str) -> None:
    """Two rounds of v <- v - eta (grad F(v) + lam (v - w^t)) for client 3, by PyTorch."""
    lam, rate = 0.5, 0.1
    engine = tiny.engine(lane=lane)
    received = [engine.start()]
    rounds = list(run(ditto(lam=lam, batch_size=4, lr=rate), engine, rounds=2, seed=1))
    received.append(rounds[0].model)
    data, module = tiny.federation(), tiny.mlp().double()
    for round in range(2):
        plan = plans.draw(Work(batch_size=4), data.train, np.array([3]), np.array([3]), seed=1, round=round)
        for step in range(3):
            batch = plan.single(step, 0, data.train)
            module.zero_grad()
            nn.functional.cross_entropy(module(batch.x), batch.y).backward()
            with torch.no_grad():
                for name, value in module.named_parameters():
                    assert value.grad is not None
                    value -= rate * (value.grad + lam * (value - received[round]["params"][name]))
    own = tree.rows(rounds[-1].snapshot.memory["client"]["own"], 3)
    assert tiny.gap(own["params"], {name: p.detach() for name, p in module.named_parameters()}) <= 1e-12


def test_both_limits_of_dittos_proximal_term() -> None:
    """lam = 0: a client on its own; a stiff one: everybody has the global model it was sent."""
    free, again = (
        list(run(ditto(lam=lam, batch_size=4, lr=0.05), tiny.engine(), rounds=3, seed=1))[-1] for lam in (0.0, 19.0)
    )
    spread = [one.snapshot.memory["client"]["own"]["params"]["1.weight"].std(0).mean() for one in (free, again)]
    assert spread[1] < 0.5 * spread[0]


# --- FedAMP ----------------------------------------------------------------------------------------------------------


def stacked(rows: list[list[float]]) -> Tree:
    values = torch.tensor(rows, dtype=torch.float64)
    return {"params": {"a": values[:, :1], "b": values[:, 1:]}, "buffers": {"n": torch.arange(len(rows))}}


def test_fedamps_mixture_by_hand() -> None:
    """Clients at (0, 0), (1, 0) and (0, 3); squared distances 1, 9, 10; alpha = 0.5, sigma = 2."""
    rule = MessagePassing(alpha=0.5, sigma=2.0)
    state = {"models": stacked([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]])}
    near, far, farther = (0.25 * np.exp(-d / 2) for d in (1, 9, 10))
    expected = [
        [1 - near - far, near, far],
        [near, 1 - near - farther, farther],
        [far, farther, 1 - far - farther],
    ]
    np.testing.assert_allclose(rule.shares(state["models"]["params"]).numpy(), expected, atol=1e-14)
    sent = rule.broadcast(state, np.array([0, 2]))
    assert sent.shared == {}
    clouds = sent.personal["model"]
    np.testing.assert_allclose(clouds["params"]["a"].numpy(), [[near], [farther]], atol=1e-14)
    np.testing.assert_allclose(clouds["params"]["b"].numpy(), [[3 * far], [3 * (1 - far - farther)]], atol=1e-14)
    assert clouds["buffers"]["n"].tolist() == [0, 2]  # counters are not mixed


def test_shares_stay_on_the_simplex_whatever_alpha() -> None:
    models = stacked([[0.0, 0.0], [0.1, 0.0], [0.0, 0.1], [5.0, 5.0]])["params"]
    for rule in (MessagePassing(alpha=100.0), MessagePassing(attention="cosine", own_share=0.3, sigma=10.0)):
        shares = rule.shares(models)
        assert bool((shares >= 0).all())
        np.testing.assert_allclose(shares.sum(1).numpy(), 1, atol=1e-14)
        backwards = rule.shares(tree.rows(models, [3, 2, 1, 0]))
        np.testing.assert_allclose(backwards.numpy(), shares.flip(0, 1).numpy(), atol=1e-14)


def test_heurfedamp_by_hand() -> None:
    """Cosines 0, 1, 0 between (1, 0), (0, 2), (3, 0)."""
    rule = MessagePassing(attention="cosine", own_share=0.4, sigma=2.0)
    shares = rule.shares(stacked([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])["params"]).numpy()
    like, unlike = np.exp(2.0), 1.0
    row = [0.4, 0.6 * unlike / (like + unlike), 0.6 * like / (like + unlike)]
    np.testing.assert_allclose(shares[0], row, atol=1e-14)
    np.testing.assert_allclose(shares[1], [0.3, 0.4, 0.3], atol=1e-14)


def test_fedamp_keeps_the_models_of_those_who_sit_out() -> None:
    rounds = list(run(fedamp(batch_size=4, lr=0.1, selection=Uniform(count=2)), tiny.engine(), rounds=2, seed=1))
    before, after = (one.snapshot.server["models"]["params"]["1.weight"] for one in rounds)
    moved = [k for k in range(len(tiny.SIZES)) if not torch.equal(before[k], after[k])]
    assert moved == rounds[1].chosen.tolist()
    own = rounds[1].snapshot.memory["client"]["trained_model"]["params"]["1.weight"]
    assert torch.equal(own, after)  # the server's copies are what the clients have


def test_fedamp_refuses_what_its_server_has_no_place_for() -> None:
    with pytest.raises(Invalid, match=r"fedamp.weighting = UniformWeights\(\) has no effect in fedamp"):
        fedamp(weighting=UniformWeights())


# --- how good they are -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["serial", "batched"])
@pytest.mark.parametrize("recipe", [ditto, fedamp, fedper], ids=lambda recipe: recipe.__name__)
def test_each_client_is_judged_by_its_own_model_on_its_own_rows(lane: str, recipe: Any) -> None:
    engine, algorithm = tiny.engine(lane=lane), recipe(batch_size=4, lr=0.2)
    *_, last = run(algorithm, engine, rounds=3, seed=1)
    test = personal_test(algorithm, engine)
    assert test is not None
    found = test(last.snapshot.server)
    kept = last.snapshot.memory["client"]
    for k in range(len(tiny.SIZES)):
        if recipe is fedper:
            mine = tree.rows(kept["personal_layers"]["params"], k)
            values = {**last.model["params"], **mine}
        else:
            values = tree.rows(kept["own" if recipe is ditto else "trained_model"]["params"], k)
        module = tiny.mlp().double()
        module.load_state_dict(values)
        x, y = tiny.federation().test.of(k)  # type: ignore[union-attr]
        output = module(x).detach()
        assert found.values[k] == pytest.approx(float((output.argmax(1) == y).double().mean()), abs=1e-12)
        assert found.loss[k] == pytest.approx(float(nn.functional.cross_entropy(output, y)), abs=1e-12)


def test_the_record_has_personal_columns_where_models_are_personal() -> None:
    def columns(algorithm: Any) -> dict[str, Any]:
        options: dict[str, Any] = {"device": "cpu", "lane": "serial", "dtype": "float64"}
        made = train(
            tiny.mlp().double(), tiny.federation(), algorithm, rounds=2, evaluate_every=2, progress=False, **options
        )
        assert made.history[0].get("personal_accuracy_mean") is None  # not tested in round 1
        return {key: value for key, value in made.history[-1].items() if key.startswith("personal")}

    assert columns(fedavg(batch_size=4)) == {}
    found = columns(ditto(batch_size=4))
    names = ("loss", "accuracy_mean", "accuracy_median", "accuracy_worst_tenth", "accuracy_spread")
    assert set(found) == {f"personal_{name}" for name in names} and None not in found.values()


def test_measuring_changes_nothing() -> None:
    algorithm = ditto(batch_size=4)
    plain = list(run(algorithm, tiny.engine(), rounds=3, seed=1))
    engine = tiny.engine()
    test = personal_test(algorithm, engine)
    assert test is not None
    watched = []
    for one in run(algorithm, engine, rounds=3, seed=1):
        test(one.snapshot.server)
        watched.append(one)
    for one, other in zip(plain, watched):
        assert tiny.same(one.snapshot.server, other.snapshot.server)
        assert tiny.same(one.snapshot.memory, other.snapshot.memory)
