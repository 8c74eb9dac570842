"""q-FFL and AFL against their papers' equations, by hand and on quadratics with known answers."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.algorithms.afl import afl
from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.qffl import qffl
from consilience.core.exchange import Cohort
from consilience.core.protocols import ServerRule
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.server import Averaging, UniformWeights
from consilience.server.averaging.ledgers.qffl_step import QfflStep
from consilience.server.averaging.weighting.by_loss import AgnosticWeights, QfflWeights, project_to_simplex
from consilience.server.protocols import Ledger, Weighting


def model(values: np.ndarray) -> Tree:
    """One model, or a stack of them."""
    whole = torch.from_numpy(np.asarray(values, dtype=np.float64))
    return {"params": {"a": whole[..., :1], "b": whole[..., 1:]}, "buffers": {}}


def vector(tree: Tree) -> np.ndarray:
    return torch.cat([tree["params"]["a"], tree["params"]["b"]], dim=-1).numpy()


def cohort_of(models: np.ndarray, losses: np.ndarray, ids: list[int] | None = None) -> Cohort:
    count = len(models)
    return Cohort(
        reply={"model": model(models), "start_loss": torch.from_numpy(np.asarray(losses, dtype=np.float64))},
        ids=np.array(ids or range(count)),
        examples=torch.arange(1, count + 1, dtype=torch.float64),
        steps=np.ones(count, dtype=np.int64),
        round=0,
    )


# --- q-FFL -----------------------------------------------------------------------------------------------------------


def printed_update(w: np.ndarray, models: np.ndarray, losses: np.ndarray, q: float, L: float) -> np.ndarray:
    """Algorithm 2 of Li et al. 2020, as printed."""
    total, h = np.zeros_like(w), 0.0
    for w_k, F in zip(models, losses):
        step = L * (w - w_k)
        total += F**q * step
        h += q * F ** (q - 1) * float(step @ step) + L * F**q
    return w - total / h


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.floats(0, 5), st.floats(0.1, 100))
def test_q_fedavg_equals_the_printed_update(seed: int, clients: int, q: float, L: float) -> None:
    rng = np.random.default_rng(seed)
    w, models, losses = rng.normal(size=4), rng.normal(size=(clients, 4)), rng.uniform(0.05, 5, size=clients)
    server = Averaging(weighting=QfflWeights(q=q), ledgers=(QfflStep(q=q, lipschitz=L),))
    after, notes = server.update(server.init(model(w), clients), cohort_of(models, losses))
    np.testing.assert_allclose(vector(server.model(after)), printed_update(w, models, losses, q, L), rtol=0, atol=1e-12)
    np.testing.assert_allclose(notes["weights"].numpy(), losses**q / (losses**q).sum(), rtol=1e-12)


def test_q_fedavg_by_hand() -> None:
    """w = (0, 0), one client at (-1, 0) with F = 2, q = 1, L = 10: Delta = 2 x 10 x (1, 0), h = 100 + 20: w = -1/6."""
    server = Averaging(weighting=QfflWeights(q=1.0), ledgers=(QfflStep(q=1.0, lipschitz=10.0),))
    after, _ = server.update(server.init(model(np.zeros(2)), 1), cohort_of(np.array([[-1.0, 0.0]]), np.array([2.0])))
    np.testing.assert_allclose(vector(server.model(after)), [-1 / 6, 0], rtol=1e-15)


def test_without_q_it_is_fedavg_with_equal_weights() -> None:
    plain = fedavg(lr=0.05, batch_size=4, weighting=UniformWeights())
    fair = qffl(q=0.0, lr=0.05, batch_size=4)
    runs = [list(run(algorithm, tiny.engine(tiny.convnet), rounds=3, seed=1)) for algorithm in (plain, fair)]
    assert tiny.gap(runs[1][-1].model, runs[0][-1].model) <= 1e-12


def test_losses_are_those_of_the_model_that_was_sent() -> None:
    """The first round's `start_loss` is the initial model's mean loss over each client's rows."""
    data, engine = tiny.federation(), tiny.engine(tiny.mlp)
    first = next(iter(run(qffl(q=1.0, lr=0.05, batch_size=4), engine, rounds=1, seed=1)))
    for client in range(5):
        x, y = data.train.of(client)
        output, _ = engine.task.apply(engine.start(), x, train=False)
        expected = torch.nn.functional.cross_entropy(output, y).item()
        assert first.cohort.reply["start_loss"][client].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("q", [0.0, 0.001, 0.5, 1.0, 50.0])
@pytest.mark.parametrize("losses", [[0.0, 0.0, 0.0], [0.0, 1.0, 2.0], [1e-300, 1e300, 1.0], [1e6, 1e6, 1e6]])
def test_extreme_losses_leave_sound_values(q: float, losses: list[float]) -> None:
    server = Averaging(weighting=QfflWeights(q=q), ledgers=(QfflStep(q=q, lipschitz=20.0),))
    models = np.random.default_rng(0).normal(size=(3, 2))
    after, notes = server.update(server.init(model(np.zeros(2)), 3), cohort_of(models, np.array(losses)))
    assert tiny.finite(after) and float(notes["weights"].sum()) == pytest.approx(1, abs=1e-12)
    if len(set(losses)) == 1:
        np.testing.assert_allclose(notes["weights"].numpy(), 1 / 3, rtol=1e-14)


def descend(server: ServerRule, rounds: int, lr: float) -> np.ndarray:
    """One exact gradient step a client and round on F_1 = w^2 / 2 and F_2 = 2 (w - 3)^2; all iterates.

    The sum is least at w = 2.4; the larger of the two at w = 2, where both are 2.
    """
    state, path = server.init(model(np.array([0.0, 0.0])), 2), []
    for _ in range(rounds):
        w = vector(server.model(state))[0]
        losses, slopes = np.array([w**2 / 2, 2 * (w - 3) ** 2]), np.array([w, 4 * (w - 3)])
        models = np.stack([w - lr * slopes, np.zeros(2)], axis=1)
        state, _ = server.update(state, cohort_of(models, losses))
        path.append(float(vector(server.model(state))[0]))
    return np.array(path)


def test_a_larger_q_is_fairer_on_different_quadratics() -> None:
    ends = []
    for q in (0.0, 1.0, 10.0):
        server = Averaging(weighting=QfflWeights(q=q), ledgers=(QfflStep(q=q, lipschitz=1 / 0.02),))
        ends.append(descend(server, 800, 0.02)[-1])
    assert ends[0] == pytest.approx(2.4, abs=1e-6)  # of w + 4 (w - 3)
    # stationary: F_1 F_1' + F_2 F_2' = w^3 / 2 + 8 (w - 3)^3 = 0, so w = 3 c / (1 + c) with c = 16^(1/3)
    assert ends[1] == pytest.approx(3 * 16 ** (1 / 3) / (1 + 16 ** (1 / 3)), abs=1e-4)
    assert 2.0 < ends[2] < ends[1] < ends[0]


# --- AFL -------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8), st.integers(0, 2**31))
def test_projection_onto_the_simplex_is_the_nearest_point(values: list[float], seed: int) -> None:
    point = np.array(values)
    got = project_to_simplex(torch.tensor(values, dtype=torch.float64)).numpy()
    assert (got >= 0).all() and got.sum() == pytest.approx(1, abs=1e-12)
    for other in np.random.default_rng(seed).dirichlet(np.ones(len(point)), size=30):
        assert (point - got) @ (other - got) <= 1e-9  # the angle to every other point of the simplex is obtuse


def test_projection_by_hand() -> None:
    assert project_to_simplex(torch.tensor([0.2, 0.3, 0.5]).double()).tolist() == pytest.approx([0.2, 0.3, 0.5])
    assert project_to_simplex(torch.tensor([5.0, 0.0]).double()).tolist() == [1.0, 0.0]
    assert project_to_simplex(torch.tensor([1.0, 0.6, -1.0]).double()).tolist() == pytest.approx([0.7, 0.3, 0.0])
    assert project_to_simplex(torch.tensor([-3.0]).double()).tolist() == [1.0]


def test_afl_by_hand() -> None:
    """Round 1 is the plain mean; lambda = (1/2, 1/2) + 0.1 x (1, 3), less 0.2 each: (0.4, 0.6), for round 2."""
    server = Averaging(weighting=AgnosticWeights(step_size=0.1))
    cohort = cohort_of(np.array([[1.0, 0.0], [5.0, 0.0]]), np.array([1.0, 3.0]))
    state, notes = server.update(server.init(model(np.zeros(2)), 2), cohort)
    assert notes["weights"].tolist() == [0.5, 0.5] and vector(server.model(state))[0] == 3.0
    np.testing.assert_allclose(state["weighting"]["lambda"].numpy(), [0.4, 0.6], rtol=1e-14)
    state, notes = server.update(state, cohort)
    np.testing.assert_allclose(notes["weights"].numpy(), [0.4, 0.6], rtol=1e-14)
    assert vector(server.model(state))[0] == pytest.approx(0.4 * 1 + 0.6 * 5)


def test_clients_that_do_not_reply_keep_their_place_in_the_mixture() -> None:
    """Of three, the last replies alone: (1/3, 1/3, 1/3 + 0.3) less 0.1 each."""
    weighting = AgnosticWeights(step_size=0.1)
    state = weighting.init(model(np.zeros(2)), 3)
    weights, state, _ = weighting.weigh(cohort_of(np.ones((1, 2)), np.array([3.0]), ids=[2]), {}, state)
    assert weights.tolist() == [1.0]
    np.testing.assert_allclose(state["lambda"].numpy(), [1 / 3 - 0.1, 1 / 3 - 0.1, 1 / 3 + 0.2], rtol=1e-14)


def test_clients_outside_the_mixture_count_the_same() -> None:
    """Where lambda is zero for all that replied, there is no share to scale."""
    state = {"lambda": torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)}
    weights, state, _ = AgnosticWeights().weigh(cohort_of(np.ones((2, 2)), np.zeros(2)), {}, state)
    assert weights.tolist() == [0.5, 0.5] and state["lambda"].tolist() == [0.0, 0.0, 1.0]


def test_afl_reaches_the_minimax_point() -> None:
    """The mean iterate nears w = 2, where both clients lose 2; FedAvg goes to 2.4."""
    path = descend(Averaging(weighting=AgnosticWeights(step_size=0.02)), 1500, 0.02)
    assert path[500:].mean() == pytest.approx(2.0, abs=0.02)
    assert descend(Averaging(weighting=UniformWeights()), 600, 0.02)[-1] == pytest.approx(2.4, abs=1e-9)


def test_recipes_need_the_loss_at_the_start() -> None:
    for weighting, name in ((QfflWeights(), "qffl"), (AgnosticWeights(), "afl")):
        assert isinstance(weighting, Weighting) and weighting.needs_each_reply
        server = Averaging(weighting=weighting)
        cohort = cohort_of(np.ones((2, 2)), np.ones(2))
        del cohort.reply["start_loss"]
        with pytest.raises(Invalid, match=f"use the algorithm {name}"):
            server.update(server.init(model(np.zeros(2)), 2), cohort)
    assert isinstance(QfflStep(), Ledger)


def test_recipes_pass_their_options_on() -> None:
    server = qffl(q=2.0, lr=0.05).server
    assert isinstance(server, Averaging)
    assert server.weighting == QfflWeights(q=2.0)
    assert server.ledgers == (QfflStep(q=2.0, lipschitz=20.0),)
    assert qffl(lipschitz=3.0).server.ledgers == (QfflStep(lipschitz=3.0),)  # type: ignore[attr-defined]
    server = afl(lambda_lr=0.3).server
    assert isinstance(server, Averaging) and server.weighting == AgnosticWeights(step_size=0.3)
    with pytest.raises(Invalid, match="q"):
        QfflWeights(q=-1.0)
