"""Local training against plain PyTorch: the same batches, the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.fedprox import fedprox
from consilience.client import SGD, Adam, LocalTraining, Proximal
from consilience.core import plans, tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.federation import Federation
from consilience.core.plans import Work
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.selection import Everyone
from consilience.server import Averaging
from consilience.task.task import Task

ROWS, ROUNDS, EPOCHS, BATCH, SEED = 22, 2, 3, 5, 3  # 22 rows in batches of 5: the last holds two


def normed() -> nn.Module:
    """Batch norm, no dropout (whose pattern is ours, not torch's)."""
    return tiny.seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Linear(8, 3),
        )
    )


def by_hand(module: nn.Module, data: Federation, optimiser: Any, schedule: Any = None) -> tree.Tree:
    """An ordinary loop over the batches that the plan names; a new optimiser each round, as FedAvg's clients have."""
    module.train()
    for round in range(ROUNDS):
        steps = np.array([EPOCHS * -(-ROWS // BATCH)])
        plan = plans.draw(Work(batch_size=BATCH), data.train, np.array([0]), steps, seed=SEED, round=round)
        opt = optimiser(module.parameters())
        if schedule:
            opt.param_groups[0]["lr"] = schedule(round)
        for step in range(int(steps[0])):
            batch = plan.single(step, 0, data.train)
            opt.zero_grad()
            F.cross_entropy(module(batch.x), batch.y).backward()
            opt.step()
    return {
        "params": {n: p.detach() for n, p in module.named_parameters()},
        "buffers": dict(module.named_buffers()),
    }


def federated(build: Any, data: Federation, solver: Any, *, lane: str = "serial", dtype: str = "float32") -> tree.Tree:
    """The same by FedAvg with one client."""
    client = LocalTraining(solver=solver, work=Work(epochs=EPOCHS, batch_size=BATCH))
    engine = Vectorised(Task(build()), data, device="cpu", lane=lane, dtype=dtype, clients_at_once=1)  # type: ignore[arg-type]
    algorithm = Algorithm(selection=Everyone(), client=client, server=Averaging())
    *_, last = run(algorithm, engine, rounds=ROUNDS, seed=SEED)
    return last.model


def one_client(dtype: torch.dtype) -> Federation:
    data = tiny.federation((ROWS,))
    return Federation(train=data.train.to("cpu", dtype), classes=3)


OPTIMISERS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.01},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.001},
}


@pytest.mark.parametrize("build", [tiny.mlp, normed], ids=["mlp", "batch norm"])
@pytest.mark.parametrize("options", OPTIMISERS.values(), ids=OPTIMISERS)
def test_one_client_with_all_data_is_ordinary_sgd_exactly(build: Any, options: dict[str, Any]) -> None:
    """float32, serial lane, traced and untraced steps mixed: not one bit differs."""
    data = one_client(torch.float32)
    expected = by_hand(build(), data, lambda p: torch.optim.SGD(p, lr=0.05, **options))
    got = federated(build, data, SGD(lr=0.05, **options))
    assert tiny.same(got, expected)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("build", [tiny.mlp, normed], ids=["mlp", "batch norm"])
@pytest.mark.parametrize("options", OPTIMISERS.values(), ids=OPTIMISERS)
def test_batched_lane_is_ordinary_sgd(build: Any, options: dict[str, Any]) -> None:
    data = one_client(torch.float64)
    expected = by_hand(build().double(), data, lambda p: torch.optim.SGD(p, lr=0.05, **options))
    got = federated(build, data, SGD(lr=0.05, **options), lane="batched", dtype="float64")
    assert tiny.gap(got, expected) <= 1e-12


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("lane", ["serial", "batched"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["adam", "adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
def test_adam(lane: str, decoupled: bool, weight_decay: float) -> None:
    data = one_client(torch.float64)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    expected = by_hand(
        tiny.mlp().double(), data, lambda p: kind(p, lr=0.01, betas=(0.8, 0.95), weight_decay=weight_decay)
    )
    solver = Adam(lr=0.01, beta1=0.8, beta2=0.95, weight_decay=weight_decay, decoupled=decoupled)
    assert tiny.gap(federated(tiny.mlp, data, solver, lane=lane, dtype="float64"), expected) <= 1e-12


@pytest.mark.usefixtures("untraced")
def test_the_rate_decays_by_round() -> None:
    data = one_client(torch.float64)
    expected = by_hand(
        tiny.mlp().double(), data, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), lambda r: 0.1 * 0.7**r
    )
    got = federated(tiny.mlp, data, SGD(lr=0.1, momentum=0.5, decay=0.7), dtype="float64")
    assert tiny.gap(got, expected) <= 1e-12


def test_the_recipes_options_reach_the_solver() -> None:
    made = fedavg(lr=0.2, momentum=0.5, weight_decay=0.1, lr_decay=0.9, epochs=2.5, batch_size=None).client
    assert made == LocalTraining(
        solver=SGD(lr=0.2, momentum=0.5, weight_decay=0.1, decay=0.9), work=Work(epochs=2.5, batch_size=None)
    )
    assert fedavg(optimiser="adam", lr=0.1, weight_decay=0.2).client.solver == Adam(lr=0.1, weight_decay=0.2)
    assert fedavg(optimiser="adamw").client.solver == Adam(lr=0.01, decoupled=True)


@pytest.mark.parametrize("ignored", [{"momentum": 0.9}, {"lr_decay": 0.5}])
def test_options_the_optimiser_does_not_have_are_refused(ignored: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=next(iter(ignored))):
        fedavg(optimiser="adam", **ignored)


def test_the_reported_loss_is_the_mean_over_rows() -> None:
    """Not over batches: the last batch holds fewer rows. At rate ~0 the model stands still."""
    data = one_client(torch.float64)
    engine = tiny.engine(data=data)
    (one,) = run(fedavg(lr=1e-300, batch_size=5), engine, rounds=1)
    module = tiny.mlp().double()
    expected = F.cross_entropy(module(data.train.x), data.train.y).item()
    assert one.cohort.reply["loss"].item() == pytest.approx(expected, abs=1e-12)


# --- FedProx ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_fedprox_without_its_term_is_fedavg(lane: str) -> None:
    def last(algorithm: Algorithm) -> tree.Tree:
        *_, one = run(algorithm, tiny.engine(tiny.convnet, lane=lane), rounds=2, seed=1)
        return one.model

    assert tiny.same(last(fedprox(mu=0.0, batch_size=4, lr=0.1)), last(fedavg(batch_size=4, lr=0.1)))
    assert not tiny.same(last(fedprox(mu=1.0, batch_size=4, lr=0.1)), last(fedavg(batch_size=4, lr=0.1)))


def test_proximal_gradient_in_closed_form() -> None:
    draw = torch.Generator().manual_seed(0)
    params, anchor = (
        {
            "a": torch.randn(3, 2, generator=draw, dtype=torch.float64),
            "b": torch.randn((), generator=draw, dtype=torch.float64),
        }
        for _ in range(2)
    )
    context: Any = type("Context", (), {"message": {"model": {"params": anchor}}})
    penalty = Proximal(mu=0.3)
    value = penalty(params, context, None)  # type: ignore[arg-type]
    expected = 0.15 * sum(float((params[n] - anchor[n]).square().sum()) for n in params)
    assert value.item() == pytest.approx(expected, rel=1e-14)
    slope = torch.func.grad(lambda p: penalty(p, context, None))(params)  # type: ignore[arg-type]
    for name in params:
        torch.testing.assert_close(slope[name], 0.3 * (params[name] - anchor[name]), rtol=1e-14, atol=1e-15)


class Line(nn.Module):
    """y = w x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def line_engine(lane: str, environment: Environment | None = None) -> Vectorised:
    """Client 0: rows (1, 3), (2, 2); client 1: one row (1, -1). Losses (w x - y)^2."""
    clients = [
        (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0])),
        (torch.tensor([1.0]), torch.tensor([-1.0])),
    ]
    data = Federation.from_clients(clients)
    return Vectorised(
        Task(Line(), loss="squared_error"), data, device="cpu", dtype="float64", lane=lane, clients_at_once=9,  # type: ignore[arg-type]
        environment=environment,
    )  # fmt: skip


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_a_fedprox_round_by_hand(lane: str) -> None:
    """Full-batch gradients 2 mean(x (w x - y)) + mu (w - 1), two steps of rate 0.1, then N_k-weighted mean."""
    # also a model with a 0-d parameter
    mu, rate = 0.5, 0.1

    def steps(slope: Any) -> float:
        w = 1.0
        for _ in range(2):
            w -= rate * (slope(w) + mu * (w - 1.0))
        return w

    first = steps(lambda w: (2 * (w - 3) + 4 * (2 * w - 2)) / 2)
    second = steps(lambda w: 2 * (w + 1))
    (one,) = run(fedprox(mu=mu, lr=rate, batch_size=None, epochs=2), line_engine(lane), rounds=1)
    assert one.cohort.reply["model"]["params"]["w"].tolist() == pytest.approx([first, second], abs=1e-14)
    assert one.model["params"]["w"].item() == pytest.approx((2 * first + second) / 3, abs=1e-14)


def test_fedprox_with_many_steps_reaches_the_proximal_point() -> None:
    """min mean (w x - y)^2 + mu/2 (w - 1)^2 in closed form, per client."""
    mu = 0.5
    engine = line_engine("serial", Environment(steps=(400, 400)))
    server = Averaging()
    broadcast = server.broadcast(server.init(engine.start(), 2), np.arange(2))
    client = fedprox(mu=mu, lr=0.1, batch_size=None).client
    got = engine.exchange(client, Plain(), broadcast, np.arange(2), round=0, seed=0).reply["model"]["params"]["w"]
    # client 0: mean x^2 = 2.5, mean x y = 3.5; client 1: 1 and -1
    expected = [(2 * 3.5 + mu) / (2 * 2.5 + mu), (2 * -1 + mu) / (2 * 1 + mu)]
    assert got.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SGD(lr=0), "SGD.lr = 0.0 is out of range: it must be > 0"),
        (lambda: SGD(lr=float("nan")), "SGD.lr = nan is out of range"),
        (lambda: SGD(lr="fast"), "SGD.lr = 'fast' must be a number"),  # type: ignore[arg-type]
        (lambda: SGD(nesterov=True), "SGD.nesterov = True needs SGD.momentum > 0"),
        (lambda: SGD(momentum=1.0), "SGD.momentum = 1.0 is out of range: it must be >= 0 and < 1"),
        (lambda: Adam(eps=0), "Adam.eps"),
        (lambda: Proximal(mu=-1), "Proximal.mu = -1.0 is out of range: it must be >= 0"),
        (lambda: fedavg(lr=-0.1), "lr = -0.1 is out of range"),
    ],
)
def test_refusals(build: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        build()


def test_solvers_do_not_touch_their_inputs() -> None:
    params = {"w": torch.tensor([1.0, 2.0])}
    grads = {"w": torch.tensor([0.5, -0.5])}
    for solver in (
        SGD(momentum=0.9, nesterov=True, weight_decay=0.1, decay=0.5),
        Adam(weight_decay=0.1, decoupled=True),
    ):
        state = solver.init(params)
        before = copy.deepcopy((params, grads, state))
        after = solver.step(params, grads, state, torch.tensor(3))
        assert tiny.same({"p": params, "g": grads, "s": state}, dict(zip("pgs", before)))
        assert tiny.structure(after[1]) == tiny.structure(state)


def test_the_reported_loss_is_the_mean_over_rows_and_padding_counts_nothing() -> None:
    """Batches of 4 and of 2 rows, cut or padded: sum of all rows' losses over 6."""
    data, rule = tiny.federation((6,)), LocalTraining(solver=SGD(lr=1e-12), work=Work(batch_size=4))
    task = Task(tiny.mlp().double())
    plan = plans.draw(rule.work, data.train, np.array([0]), np.array([2]), seed=0, round=0)
    message = {"model": task.start(), "round": torch.tensor(0)}
    losses = {}
    for name in ("single", "padded"):
        carry = rule.begin(task, message, {})
        for step in range(2):
            cut = name == "single"
            batch = plan.single(step, 0, data.train) if cut else plan.padded(step, 0, data.train, torch.float64)
            carry = rule.step(task, carry, batch, message, {})
        losses[name] = float(rule.end(task, carry, message, {})[0]["loss"])
    x, y = data.train.of(0)
    expected = float(F.cross_entropy(task.apply(task.start(), x, train=False)[0], y))
    assert losses == pytest.approx({"single": expected, "padded": expected}, abs=1e-9)
