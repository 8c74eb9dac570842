"""Every recipe on every kind of task: it trains, or it is refused for the reason that is listed here."""

from __future__ import annotations

import functools
import math
from typing import Any

import kind_tasks
import pytest
import tiny
import torch
from declared import build
from torch import Tensor, nn

from consilience import algorithms
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments.client_tests import federated_test
from consilience.experiments.evaluation import evaluate
from consilience.experiments.model_checks import try_client, try_model
from consilience.models.adapted import LoRALinear
from consilience.models.siamese import siamese_heads
from consilience.server.rules.public_rows import NoiseRows
from consilience.task.task import Task

CLASSES = "class numbers, one for each row|one class number per row"
CHAINS = "matched averaging knows chains of dense and convolutional layers"
SHAPED = {"fedaf": {"shape": (4,)}, "feddm": {"shape": (4,)}, "feddf": {"public": NoiseRows(count=8, shape=(4,))}}
ENTRIES = ("tokens", "next_token", "dense")
ADAPTERS = ("fedit", "ffa_lora", "flexlora", "flora", "hetlora")  # they average the adapters of dense layers


def reason(recipe: str, kind: str) -> str | None:
    """Why a recipe does not support a kind of task; None where it does."""
    if recipe in ("fedaf", "feddf", "feddm", "fedgen") and kind != "classification":
        return CLASSES  # they hold or make rows of every class
    if recipe == "fedma" and kind in ENTRIES:
        return CHAINS
    if recipe == "fedsiam_da" and kind in ENTRIES:
        return r"no predict\(z\)"  # its heads are for one representation a row
    return None


class Adapted(nn.Module):
    """A model whose outputs go through a frozen dense layer with an adapter; of pixels, channels last and back."""

    def __init__(self, module: nn.Module, outputs: int, axis: int) -> None:
        super().__init__()
        self.adapted, self.axis = LoRALinear(nn.Linear(outputs, outputs), 2, 2.0), axis
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(self.module(x).movedim(self.axis, -1)).movedim(-1, self.axis)


@functools.cache
def parts(kind: str, heads: bool, adapters: bool) -> tuple[Task, Federation]:
    federation = kind_tasks.federation(kind)
    module = kind_tasks.module(kind)
    if heads and kind not in ENTRIES:
        module = tiny.seeded(lambda: siamese_heads(module, projection=4))
    if adapters:
        outputs = kind_tasks.CASES[kind].outputs
        module = tiny.seeded(lambda: Adapted(module, outputs, 1 if kind == "dense" else -1))
    return try_model(Task(module, kind), federation, "the model", "the data"), federation


def engine(task: Task, federation: Federation, **options: Any) -> Vectorised:
    return Vectorised(task, federation, **{"device": "cpu", "dtype": "float64", "lane": "serial", **options})


@pytest.mark.parametrize("name", algorithms.names())
def test_every_recipe_trains_every_kind_or_says_why_not(name: str, untraced: None) -> None:
    declared = build(name)
    if name in SHAPED:
        options = {"server_steps": 2, "lr": 0.05, "epochs": 1, "batch_size": 4, **SHAPED[name]}
        known = algorithms.recipe(name)
        declared = known(**{**({} if name == "feddf" else {"per_class": 1}), **options})
    for kind in kind_tasks.CASES:
        task, federation = parts(kind, name == "fedsiam_da", name in ADAPTERS)
        refused = reason(name, kind)
        if refused is not None:
            with pytest.raises(Invalid, match=refused):
                try_client(declared, task)
            continue
        task = try_client(declared, task)
        (done,) = run(declared, engine(task, federation), rounds=1, seed=1)
        assert tiny.finite(done.model), f"{name} on {kind}"
        assert len(done.cohort) == len(federation) or name in ("centralised", "fedasync", "hierarchical")


@pytest.mark.parametrize("kind", kind_tasks.CASES)
@pytest.mark.parametrize("lane", ["batched", "streams"])
def test_lanes_agree_with_weights_smoothing_and_ignored_entries(kind: str, lane: str) -> None:
    """Class weights, label smoothing and weights of rows, with short batches and single rows."""
    settings: dict[str, Any] = {}
    if kind != "regression":
        width = 2 if kind == "binary" else kind_tasks.CASES[kind].outputs
        settings = {"class_weights": tuple(0.5 + k for k in range(width)), "label_smoothing": 0.1}
    draw = torch.Generator().manual_seed(0)
    given = [kind_tasks.CASES[kind].rows(size, draw) for size in kind_tasks.SIZES]
    weighted = [(x, y, torch.rand(len(y), generator=draw) + 0.1) for x, y in given]
    data = Federation.from_clients(weighted, client_tests=given)
    task = try_model(kind_tasks.task(kind, **settings), data, "the model", "the data")
    found = []
    for name in ("serial", lane):
        made = engine(task, data, lane=name, clients_at_once=4)
        (done,) = run(build("fedavg", batch_size=4, epochs=2), made, rounds=1, seed=1)
        found.append(done)
    assert tiny.gap(found[0].model, found[1].model) < 1e-12
    assert found[0].snapshot.losses == pytest.approx(found[1].snapshot.losses, rel=1e-12)


@pytest.mark.parametrize("kind", kind_tasks.CASES)
def test_clients_find_the_sums_that_the_server_finds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Federated evaluation in groups gives what central evaluation gives, of all rows and of every client."""
    federation = kind_tasks.federation(kind)
    task = try_model(kind_tasks.task(kind), federation, "the model", "the data")
    made = engine(task, federation, lane="batched", clients_at_once=3)
    central = evaluate(made.task, made.start(), made.test_rows)
    monkeypatch.setattr(Vectorised, "test_rows", None)
    test = federated_test(made)
    assert test is not None
    found = test(made.start())
    assert found is not None and found.values.keys() == central.values.keys()
    for key, value in central.values.items():
        assert found.values[key] == (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)), key
    assert found.clients.values == pytest.approx(central.clients.values, rel=1e-9, nan_ok=True)
    assert found.clients.loss == pytest.approx(central.clients.loss, rel=1e-9)
    assert not any(math.isnan(value) for value in found.clients.loss)


def test_weights_of_rows_are_factors_of_their_losses() -> None:
    """One step of gradient descent on a line: w <- w - lr mean(weight * 2 (w x - y) x), padding apart."""
    x, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 0.0, 2.0])
    weight = torch.tensor([1.0, 3.0, 0.5])
    line = nn.Linear(1, 1, bias=False)
    nn.init.constant_(line.weight, 0.5)
    data = Federation.from_clients([(x, y, weight), (x[:1], y[:1], weight[:1])])
    task = try_model(Task(line, "regression"), data, "the line", "the data")
    for lane in ("serial", "batched"):
        made = engine(task, data, lane=lane, clients_at_once=2)
        (done,) = run(build("fedavg", lr=0.1, batch_size=8), made, rounds=1, seed=0)
        one = 0.5 - 0.1 * float((weight * 2 * (0.5 * x[:, 0] - y) * x[:, 0]).mean())
        two = 0.5 - 0.1 * float((weight * 2 * (0.5 * x[:, 0] - y) * x[:, 0])[0])
        assert done.model["params"]["weight"].item() == pytest.approx((3 * one + two) / 4, rel=1e-6)
