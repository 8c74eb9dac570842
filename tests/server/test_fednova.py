"""FedNova by its equations, and DUW-FedNova's paced clients, against plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn

import consilience as cs
from consilience.client.local_training import LocalTraining
from consilience.client.paced_training import PacedTraining
from consilience.client.solvers import SGD, Adam
from consilience.client.terms.proximal import Proximal
from consilience.core.exchange import Cohort
from consilience.core.federation import Federation
from consilience.core.settings import Invalid
from consilience.environments.environment import Environment
from consilience.server.rules.normalised_averaging import NormalisedAveraging
from consilience.server.rules.paced_averaging import PacedAveraging, paces

pytestmark = pytest.mark.usefixtures("untraced")


def cohort(models: Any, *, examples: Any, steps: Any) -> Cohort:
    stacked = torch.as_tensor(np.asarray(models, dtype=np.float64))
    counts = torch.arange(len(stacked))
    return Cohort(
        reply={"model": {"params": {"w": stacked}, "buffers": {"mean": stacked[:, 0], "seen": counts}}},
        ids=np.arange(len(stacked)),
        examples=torch.tensor(examples, dtype=torch.float64),
        steps=np.asarray(steps),
        round=0,
    )


def start(w: Any) -> dict[str, Any]:
    w = torch.as_tensor(np.asarray(w, dtype=np.float64))
    return {"params": {"w": w}, "buffers": {"mean": w[0], "seen": torch.tensor(0)}}


def test_eqs_9_to_11_by_hand() -> None:
    """p = 1/4, 3/4; tau = 2, 4, so tau_eff = 3.5; updates per step (1, 0) and (0, 1)."""
    server = NormalisedAveraging()
    state = server.init(start([10.0, 10.0]), 2)
    after, notes = server.update(state, cohort([[8.0, 10.0], [10.0, 6.0]], examples=[1, 3], steps=[2, 4]))
    np.testing.assert_allclose(after["model"]["params"]["w"], [10 - 3.5 * 0.25, 10 - 3.5 * 0.75], rtol=1e-14)
    np.testing.assert_allclose(after["model"]["buffers"]["mean"], 0.25 * 8 + 0.75 * 10)
    assert int(after["model"]["buffers"]["seen"]) == 1
    assert float(notes["effective_steps"]) == 3.5 and notes["weights"].tolist() == [0.25, 0.75]


def test_a_silent_client_is_left_out_of_tau_eff_and_stands_still() -> None:
    """p = 1/4, 3/4; tau = 0, 4: tau_eff = 3, and w - 3 * 3/4 * (w - w_2) / 4."""
    server = NormalisedAveraging()
    state = server.init(start([10.0, 10.0]), 2)
    after, notes = server.update(state, cohort([[10.0, 10.0], [10.0, 6.0]], examples=[1, 3], steps=[0, 4]))
    np.testing.assert_allclose(after["model"]["params"]["w"], [10, 10 - 3 * 0.75], rtol=1e-14)
    assert float(notes["effective_steps"]) == 3.0


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"terms": (Proximal(mu=0.5),)}, {"lr_decay": 0.5}])
@pytest.mark.parametrize("model", [tiny.mlp, tiny.convnet])
def test_with_equal_steps_it_is_fedavg(model: Any, options: dict[str, Any]) -> None:
    even = Environment(steps=(3,) * 5)
    runs = []
    for recipe in (cs.fednova, cs.fedavg):
        engine = tiny.engine(model, environment=even)
        algorithm = recipe(lr=0.05, batch_size=4, **options)
        runs.append([one.model for one in cs.run(algorithm, engine, rounds=3, seed=1)])
    for nova, average in zip(*runs):
        assert tiny.gap(nova, average) <= 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_what_steps_with_momentum_add_up_to(momentum: float, steps: int) -> None:
    """A constant gradient of one moves the model by lr times this."""
    velocity = total = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        total += velocity
    got = NormalisedAveraging(momentum=momentum).length(np.array([steps]))
    assert float(got[0]) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_what_steps_with_a_proximal_term_add_up_to(steps: int) -> None:
    """w <- w - lr (1 + mu w) from 0, with lr mu = 0.05."""
    w = 0.0
    for _ in range(steps):
        w = w - 0.1 * (1 + 0.5 * w)
    got = NormalisedAveraging(shrink=0.05).length(np.array([steps]))
    assert 0.1 * float(got[0]) == pytest.approx(-w, abs=1e-12)


# --- paced clients ---------------------------------------------------------------------------------------------------


def test_paces_by_hand() -> None:
    """tau_eff = (1*2 + 3*4 + 4*0) / 8 = 1.75."""
    got = paces(torch.tensor([1.0, 3.0, 4.0]), np.array([2, 4, 0]))
    np.testing.assert_allclose(got, [1.75 / 2, 1.75 / 4, 1.0])
    assert paces(torch.tensor([1.0, 1.0]), np.array([0, 0])).tolist() == [1.0, 1.0]
    assert paces(torch.tensor([1.0, 5.0]), np.array([3, 3])).tolist() == [1.0, 1.0]


def algorithm_5(
    rows: list[tuple[np.ndarray, np.ndarray]], w: np.ndarray, taus: list[int], lr: float
) -> list[np.ndarray]:
    """Full-batch least squares: tau_k steps of lr tau_eff / tau_k each."""
    sizes = np.array([len(y) for _, y in rows])
    effective = sizes @ np.array(taus) / sizes.sum()
    models = []
    for (x, y), tau in zip(rows, taus):
        here = w.copy()
        for _ in range(tau):
            here = here - lr * effective / tau * 2 * x.T @ (x @ here - y) / len(y)
        models.append(here)
    return models


def test_duw_fednova_is_algorithm_5_and_not_fednova() -> None:
    draw = np.random.default_rng(0)
    rows = [(draw.normal(size=(n, 3)), draw.normal(size=n)) for n in (4, 2, 5)]
    data = Federation.from_clients([(torch.from_numpy(x), torch.from_numpy(y[:, None])) for x, y in rows])
    line = tiny.seeded(lambda: nn.Linear(3, 1, bias=False, dtype=torch.float64))
    taus, silent = (3, 2, 1), Environment(steps=(3, 2, 1), communication=(1.0, 0.0, 1.0), silent="broadcast_model")
    weights = ((0.5, 0.2, 0.3),)
    schedule = cs.ScheduleWeights(table=weights)
    found = {}
    for name, environment in (("all", Environment(steps=taus)), ("silent", silent)):
        task = cs.Task(line, loss="squared_error")
        engine = cs.Vectorised(task, data, environment=environment, device="cpu", dtype="float64", lane="serial")
        start = engine.start()["params"]["weight"][0].numpy()
        for recipe in (cs.duw_fednova, cs.fednova):
            algorithm = recipe(lr=0.05, batch_size=None, weighting=schedule)
            (done,) = cs.run(algorithm, engine, rounds=1, seed=0)
            found[name, recipe.__name__] = done.model["params"]["weight"][0].numpy()
        heard = list(taus) if name == "all" else [3, 0, 1]
        expected = sum(share * w for share, w in zip(weights[0], algorithm_5(rows, start, heard, 0.05)))
        np.testing.assert_allclose(found[name, "duw_fednova"], expected, rtol=1e-12)
    assert np.abs(found["all", "duw_fednova"] - found["all", "fednova"]).max() > 1e-4  # the trajectories differ


def test_with_equal_steps_paced_training_is_plain() -> None:
    even = Environment(steps=(3,) * 5)
    schedule = cs.ScheduleWeights(table=((0.1, 0.3, 0.05, 0.35, 0.2),))
    models = []
    for recipe in (cs.duw_fednova, cs.duw_fedavg):
        engine = tiny.engine(tiny.convnet, environment=even)
        models.append([one.model for one in cs.run(recipe(lr=0.05, weighting=schedule), engine, rounds=2, seed=1)])
    for one, other in zip(*models):
        assert tiny.gap(one, other) <= 1e-12


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (cs.fednova, {"optimiser": "adam"}, "fednova needs optimiser = 'sgd'"),
        (cs.fednova, {"momentum": 0.9, "terms": (Proximal(mu=0.1),)}, "momentum or with a proximal term, not both"),
        (cs.duw_fednova, {"momentum": 0.9}, "scales the steps of plain SGD"),
        (cs.duw_fednova, {"terms": (Proximal(mu=0.1),)}, "duw_fednova.terms cannot be used"),
    ],
)
def test_what_cannot_meet_is_refused(recipe: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        recipe(**options)


def test_paced_training_takes_plain_sgd_alone() -> None:
    assert PacedTraining(training=LocalTraining(solver=SGD(lr=0.1))).work == LocalTraining().work
    with pytest.raises(Invalid, match="scales the steps of plain SGD"):
        PacedTraining(training=LocalTraining(solver=Adam()))
    assert not PacedAveraging().needs_each_reply and NormalisedAveraging().needs_each_reply
