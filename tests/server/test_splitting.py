"""FedSplit and its hybrid: against closed forms, against plain NumPy, and against the methods that are biased."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.fedprox import fedprox
from consilience.algorithms.fedprox_fedsplit import fedprox_fedsplit
from consilience.algorithms.fedsplit import fedsplit
from consilience.channel import Chain, Clip, OverTheAir, Quantise, RandomK, TopK
from consilience.core.algorithm import Algorithm
from consilience.core.federation import Federation
from consilience.core.rounds import Round, run
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.selection import Uniform
from consilience.server.averaging.weighting.by_size import UniformWeights
from consilience.server.rules.splitting import Splitting
from consilience.task.task import Task

CURVES = np.array(
    [[1.0, 4.0], [3.0, 1.0], [2.0, 2.0], [1.0, 1.5]]
)  # F_j(w) = sum_i CURVES[j, i] (w_i - CENTRES[j, i])^2
CENTRES = np.array([[2.0, -1.0], [-1.0, 3.0], [0.5, 0.0], [4.0, 2.0]])
SLOPES = 2 * CURVES  # second derivatives: between l = 2 and L = 8
BEST_STEP = 1 / np.sqrt(2 * 8)
MINIMUM = (CURVES * CENTRES).sum(0) / CURVES.sum(0)  # of sum_j F_j


class Pair(nn.Module):
    """A linear map of two inputs without a bias, started at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def quadratics(copies: tuple[int, ...] = (1, 1, 1, 1), empty: int = 0, **options: Any) -> Vectorised:
    """Client j holds rows (sqrt(2 c_i) e_i, its product with the centre): the mean squared error is F_j."""
    clients = []
    for curve, centre, times in zip(CURVES, CENTRES, copies):
        x = torch.diag(torch.tensor(2 * curve).sqrt())
        clients.append((x.repeat(times, 1), (x @ torch.tensor(centre)).repeat(times)))
    nothing = (torch.zeros(0, 2, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
    data = Federation.from_clients([*clients, *[nothing] * empty])
    options = {"device": "cpu", "dtype": "float64", "lane": "batched", **options}
    return Vectorised(Task(Pair(), loss="squared_error"), data, **options)


def last(algorithm: Algorithm, rounds: int, engine: Vectorised | None = None, seed: int = 0) -> Round:
    return list(run(algorithm, engine or quadratics(), rounds=rounds, seed=seed))[-1]


def found(one: Round) -> np.ndarray:
    return one.model["params"]["w"].numpy()


FULL: dict[str, Any] = {"batch_size": None, "lr": 0.1}


def test_the_data_are_the_quadratics() -> None:
    engine = quadratics()
    for j in range(4):
        x, y = engine.federation.train.of(j)
        w = torch.tensor([0.3, -0.7], dtype=torch.float64)
        expected = (CURVES[j] * (w.numpy() - CENTRES[j]) ** 2).sum()
        assert float(((x @ w - y) ** 2).mean()) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(("recipe", "keeps_z"), [(fedsplit, False), (fedsplit, True), (fedprox_fedsplit, False)])
def test_it_reaches_the_true_minimiser(recipe: Any, keeps_z: bool) -> None:
    exact = recipe(step=BEST_STEP, epochs=30, keeps_z=keeps_z, **FULL)
    assert np.abs(found(last(exact, 30)) - MINIMUM).max() < 1e-10


@pytest.mark.parametrize(("mu", "bias"), [(0.0, 0.5), (0.1, 0.5), (1.0, 0.4), (10.0, 0.1)])
def test_fedavg_and_fedprox_are_biased_as_their_closed_form_says(mu: float, bias: float) -> None:
    """T steps of rate r from x end at x + pull (c_j - x), pull = (1 - (1 - r (S + mu))^T) S / (S + mu)."""
    options: dict[str, Any] = {"weighting": UniformWeights(), "epochs": 10, "batch_size": None, "lr": 0.05}
    pull = (1 - (1 - 0.05 * (SLOPES + mu)) ** 10) * SLOPES / (SLOPES + mu)
    limit = (pull * CENTRES).sum(0) / pull.sum(0)
    for algorithm in [fedprox(mu=mu, **options)] + [fedavg(**options)] * (mu == 0):
        got = found(last(algorithm, 60))
        assert np.abs(got - limit).max() < 1e-7
        assert np.abs(got - MINIMUM).max() > bias


def test_it_beats_the_rate_of_its_theorem() -> None:
    """Pathak & Wainwright: with step 1/sqrt(l L), every z comes nearer by 1 - 2 / (sqrt(kappa) + 1); kappa = 4."""
    exact = fedsplit(step=BEST_STEP, epochs=30, **FULL)
    ends = MINIMUM - BEST_STEP * SLOPES * (MINIMUM - CENTRES)  # prox at 2x - z is x where z = x - step grad F_j(x)
    start = np.linalg.norm(ends) / 2  # all z start at 0; x, a mean of 4, is at most 1/sqrt(4) of their distance away
    for one in run(exact, quadratics(), rounds=15):
        assert np.linalg.norm(found(one) - MINIMUM) <= start * (1 / 3) ** one.number + 1e-9


@pytest.mark.parametrize("keeps_z", [False, True])
@pytest.mark.parametrize("recipe", [fedsplit, fedprox_fedsplit])
def test_rounds_equal_the_algorithm_in_plain_numpy(recipe: Any, keeps_z: bool) -> None:
    """Algorithm 2 with Algorithm 1's inexact solver: unequal steps, partial participation, the mean over every z."""
    steps, step, rate = (3, 1, 2, 5), 0.4, 0.07
    algorithm = recipe(step=step, lr=rate, batch_size=None, selection=Uniform(count=2), keeps_z=keeps_z)
    x, z = np.zeros(2), np.zeros((4, 2))
    met: set[int] = set()
    for one in run(algorithm, quadratics(environment=Environment(steps=steps)), rounds=9, seed=3):
        for j in one.chosen:
            w = x.copy()
            for _ in range(steps[j]):
                w = w - rate * (SLOPES[j] * (w - CENTRES[j]) + (w - (2 * x - z[j])) / step)
            z[j] += 2 * (w - x)
        x = z.mean(0)
        np.testing.assert_allclose(found(one), x, rtol=0, atol=1e-13)
        kept = one.snapshot.server["z"]["w"] if keeps_z else one.snapshot.memory["client"]["z"]["w"]
        np.testing.assert_allclose(kept.numpy(), z, rtol=0, atol=1e-13)
        met |= set(one.chosen.tolist())
    assert met == {0, 1, 2, 3}


def test_partial_participation_and_partial_work_have_the_right_limit() -> None:
    """One step, two of four clients a round: still the true minimiser."""
    algorithm = fedprox_fedsplit(step=BEST_STEP, epochs=1, selection=Uniform(count=2), **FULL)
    uneven = Environment(steps=(1, 3, 1, 2), communication=0.8)
    assert np.abs(found(last(algorithm, 250, quadratics(environment=uneven))) - MINIMUM).max() < 1e-7


@pytest.mark.parametrize("keeps_z", [False, True])
def test_weights_by_examples_minimise_the_weighted_sum(keeps_z: bool) -> None:
    copies = (1, 2, 5, 3)
    p = np.array(copies)[:, None]
    best = (p * CURVES * CENTRES).sum(0) / (p * CURVES).sum(0)
    for selection, rounds in ((None, 40), (Uniform(count=2), 100)):
        options = {"selection": selection} if selection else {}
        algorithm = fedsplit(step=BEST_STEP, epochs=12, weights="examples", keeps_z=keeps_z, **FULL, **options)
        assert np.abs(found(last(algorithm, rounds, quadratics(copies))) - best).max() < 1e-8


def test_clients_without_data_have_no_part_in_the_mean() -> None:
    algorithm = fedsplit(step=BEST_STEP, epochs=30, **FULL)
    assert np.abs(found(last(algorithm, 40, quadratics(empty=3))) - MINIMUM).max() < 1e-10


def test_with_z_at_the_server_a_lossy_channel_does_not_bias_the_limit() -> None:
    """Three bits a value: z kept by clients drifts away from what the server was told, z at the server does not."""
    limits = {}
    for keeps_z in (False, True):
        algorithm = fedsplit(step=BEST_STEP, epochs=12, keeps_z=keeps_z, channel=Quantise(bits=3), **FULL)
        limits[keeps_z] = np.abs(found(last(algorithm, 70)) - MINIMUM).max()
    assert limits[True] < 1e-8
    assert limits[False] > 1e-3


def test_with_error_feedback_z_belongs_to_the_client() -> None:
    """What is held back is in the client's z already, and reaches the server's mean later: none is lost or doubled."""
    limits = {}
    for feedback in (True, False):
        channel = TopK(fraction=0.5, feedback=feedback)
        algorithm = fedsplit(step=BEST_STEP, epochs=12, channel=channel, **FULL)
        limits[feedback] = np.abs(found(last(algorithm, 40)) - MINIMUM).max()
    assert limits[True] < 1e-9
    assert limits[False] > 0.1
    for channel in (TopK(fraction=0.5), Chain(channels=(Clip(), RandomK(), Quantise()))):
        with pytest.raises(Invalid, match="keeps_z = True is incompatible with a channel with feedback"):
            fedsplit(step=1.0, keeps_z=True, channel=channel)


def test_silent_clients_keep_their_z() -> None:
    for silent in ("broadcast_model", "renormalise"):
        world = Environment(communication=0.5, silent=silent)  # type: ignore[arg-type]
        algorithm = fedsplit(step=BEST_STEP, epochs=30, **FULL)
        for one in run(algorithm, quadratics(environment=world), rounds=6, seed=2):
            z = one.snapshot.memory["client"]["z"]["w"].numpy()
            np.testing.assert_allclose(found(one), z.mean(0), rtol=0, atol=1e-13)


def test_the_sum_of_an_over_the_air_uplink_is_enough() -> None:
    """With hardly any noise it ends where the plain channel does; with z at the server it is refused."""
    algorithm = fedsplit(step=BEST_STEP, epochs=30, channel=OverTheAir(snr_db=240.0), **FULL)
    assert np.abs(found(last(algorithm, 40)) - MINIMUM).max() < 1e-9
    with pytest.raises(Invalid, match=r"only the sum of the replies, but Splitting.* reads each reply"):
        fedsplit(step=1.0, keeps_z=True, channel=OverTheAir())


@pytest.mark.parametrize("keeps_z", [False, True])
def test_relaxation_keeps_the_limit(keeps_z: bool) -> None:
    algorithm = fedsplit(step=BEST_STEP, epochs=12, relaxation=0.5, keeps_z=keeps_z, **FULL)
    assert np.abs(found(last(algorithm, 60)) - MINIMUM).max() < 1e-8


def test_half_relaxed_without_a_proximal_term_it_is_fedavg() -> None:
    """z moves by w - x, so the mean of every z moves by the mean of w - x: the plain mean of the replies."""
    local: dict[str, Any] = {"lr": 0.05, "batch_size": 4, "epochs": 2}
    ours = last(fedprox_fedsplit(step=1e15, relaxation=0.5, **local), 3, tiny.engine(tiny.convnet), seed=1)
    theirs = last(fedavg(weighting=UniformWeights(), **local), 3, tiny.engine(tiny.convnet), seed=1)
    assert tiny.gap(ours.model, theirs.model) < 1e-11


def test_buffers_are_averaged_over_those_that_replied() -> None:
    engine = tiny.engine(tiny.convnet)
    one = last(fedsplit(step=1.0, batch_size=4, epochs=1, selection=Uniform(count=2)), 1, engine)
    mean = one.cohort.reply["model"]["buffers"]["1.running_mean"].mean(0)
    torch.testing.assert_close(one.model["buffers"]["1.running_mean"], mean, rtol=0, atol=1e-14)
    counters = one.cohort.reply["model"]["buffers"]["1.num_batches_tracked"]
    assert one.model["buffers"]["1.num_batches_tracked"] == counters.max()


def logistic(seed: int) -> Vectorised:
    """Six heterogeneous clients: labels from a common truth, inputs shifted and scaled, classes unbalanced."""
    draw = torch.Generator().manual_seed(seed)
    truth, clients = torch.randn(5, generator=draw, dtype=torch.float64), []
    for _ in range(6):
        centre = torch.randn(5, generator=draw, dtype=torch.float64)
        x = 0.7 * torch.randn(30, 5, generator=draw, dtype=torch.float64) + centre
        noise = torch.randn(30, generator=draw, dtype=torch.float64)
        clients.append((x, (x @ (truth + 0.5 * centre) + noise > 0).to(torch.int64)))
    build = lambda: nn.Linear(5, 2)  # noqa: E731
    return Vectorised(
        Task(tiny.seeded(build)), Federation.from_clients(clients), device="cpu", dtype="float64", lane="batched"
    )


DECAY = 0.01


def objective(engine: Vectorised, w: np.ndarray) -> tuple[float, np.ndarray]:
    """(value, gradient) of the mean over clients, all of equal size, of loss + decay/2 |w|^2; w [2, 6], bias last."""
    x, y = engine.federation.train.x.numpy(), engine.federation.train.y.numpy()
    x = np.concatenate([x, np.ones((len(x), 1))], 1)
    logits = x @ w.T
    chance = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    value = -np.log(chance[np.arange(len(y)), y]).mean() + DECAY / 2 * (w**2).sum()
    return value, (chance - np.eye(2)[y]).T @ x / len(x) + DECAY * w


def least(engine: Vectorised) -> float:
    w = np.zeros((2, 6))
    for _ in range(4000):
        w = w - 0.4 * objective(engine, w)[1]
    assert np.abs(objective(engine, w)[1]).max() < 1e-6
    return objective(engine, w)[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_logistic_regression_in_equal_rounds(seed: int) -> None:
    """Ten local full-batch steps, 20 rounds: the objective above its minimum, against FedAvg and the best FedProx."""
    engine = logistic(seed)
    local: dict[str, Any] = {"lr": 0.2, "batch_size": None, "epochs": 10, "weight_decay": DECAY}

    def above(algorithm: Algorithm) -> float:
        params = last(algorithm, 20, engine).model["params"]
        w = np.concatenate([params["weight"].numpy(), params["bias"].numpy()[:, None]], 1)
        return objective(engine, w)[0] - least(engine)

    others = [above(fedavg(**local)), *(above(fedprox(mu=mu, **local)) for mu in (0.01, 0.1, 1.0))]
    assert 0 < 2 * above(fedprox_fedsplit(step=1.0, **local)) < min(others)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fedsplit(), "step"),  # type: ignore[call-arg]
        (lambda: fedsplit(step=0.0), "step = 0.0 is out of range: it must be > 0"),
        (lambda: fedsplit(step=0.01, lr=0.02), "lr = 0.02 with step = 0.01 diverges whatever the data"),
        (lambda: Splitting(weights="rows"), "Splitting.weights = 'rows' is not one of uniform, examples"),  # type: ignore[arg-type]
    ],
)
def test_refusals(build: Any, message: str) -> None:
    with pytest.raises((Invalid, TypeError), match=message):
        build()
