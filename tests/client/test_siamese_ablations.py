"""FedSiam-DA without stop-gradient and without predictor, against autograd, its equation 5, and under swapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from test_siamese_training import MU, Linear, as_tree, batch, drawn, message, remembered, rule
from torch import Tensor

from consilience.algorithms.fedsiam_da import fedsiam_da
from consilience.algorithms.fedswap import fedswap
from consilience.algorithms.simfedswap import simfedswap
from consilience.client.personal_layers import Normalisation
from consilience.client.siamese_training import SiameseTraining
from consilience.client.training_variant import Siamese
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.experiments import runner
from consilience.experiments.config import config
from consilience.server.rules.swapping import Swapping
from consilience.task.task import Task

Weights = dict[str, Tensor]
RATE = 0.7


def leaves(weights: Any) -> Weights:
    return {name: torch.tensor(value, requires_grad=True) for name, value in weights.items()}


def near(p: Tensor, z: Tensor) -> Tensor:
    return -0.5 * F.cosine_similarity(p, z, dim=1).mean()


def loss(w: Weights, copied: Weights, past: Weights, x: Tensor, y: Tensor, stop: bool, predictor: bool) -> Tensor:
    """ce + MU (hist + stop) of both models, as the paper's Algorithm 1 has it, with either part taken away."""
    z, other, before = (x @ one["encoder"].T for one in (w, copied, past))
    p, p_other = (z @ w["prediction"].T, other @ copied["prediction"].T) if predictor else (z, other)
    held, held_other = (z.detach(), other.detach()) if stop else (z, other)
    pull = near(p_other, held) + near(p, held_other)
    history = F.cosine_similarity(before.detach(), z, dim=1).mean()
    return F.cross_entropy(z @ w["head"].T, y) + MU * (history + pull)


def moved(w: Weights, total: Tensor) -> Weights:
    slopes = torch.autograd.grad(total, list(w.values()), allow_unused=True, retain_graph=True)
    return {
        name: (value - RATE * (0 if slope is None else slope)).detach().requires_grad_()
        for (name, value), slope in zip(w.items(), slopes)
    }


@pytest.mark.parametrize("kind", ["joint", "sequential", "frozen"])
@pytest.mark.parametrize(("stop", "predictor"), [(False, True), (True, False), (False, False), (True, True)])
def test_three_steps_equal_autograd(kind: str, stop: bool, predictor: bool) -> None:
    start, past = drawn(1), drawn(2)
    client = rule(
        sequential=kind == "sequential", freeze_global=kind == "frozen", stop_gradient=stop, predictor=predictor
    )
    task, memory = Task(Linear()), remembered(past)
    carry = client.begin(task, message(as_tree(start)), memory)
    w, copied = leaves(start), leaves(start)
    for number in range(3):
        now = batch(number, first=number == 0)
        carry = client.step(task, carry, now, message(as_tree(start)), memory)
        total = loss(w, copied, leaves(past), now.x, now.y, stop, predictor)
        ahead = moved(copied, total) if kind != "frozen" else copied
        if kind == "sequential":
            total = loss(w, ahead, leaves(past), now.x, now.y, stop, predictor)
        w, copied = moved(w, total), ahead
        for name, value in w.items():
            torch.testing.assert_close(carry["model"]["params"][f"{name}.weight"], value.detach(), rtol=0, atol=1e-13)
        for name, value in copied.items() if kind != "frozen" else ():
            torch.testing.assert_close(carry["copy"]["params"][f"{name}.weight"], value.detach(), rtol=0, atol=1e-13)


def test_both_off_around_a_frozen_model_is_equation_5_at_twice_mu() -> None:
    """Eq (5): ce + mu (1/2 cos(z_past, z) - 1/2 cos(z_f, z)), z_f of the received model."""
    start, past = drawn(1), drawn(2)
    client = rule(mu=MU, freeze_global=True, stop_gradient=False, predictor=False, history="round")
    task, memory, now = Task(Linear()), remembered(past), batch(0)
    carry = {**client.begin(task, message(as_tree(drawn(3))), memory), "model": as_tree(start)}
    carry = client.step(task, carry, now, message(as_tree(drawn(3))), memory)
    w, before, received = leaves(start), leaves(past), leaves(drawn(3))
    z, z_past, z_f = (now.x @ one["encoder"].T for one in (w, before, received))
    bracket = 0.5 * F.cosine_similarity(z_past, z).mean() - 0.5 * F.cosine_similarity(z_f, z).mean()
    w = moved(w, F.cross_entropy(z @ w["head"].T, now.y) + 2 * MU * bracket)
    for name, value in w.items():
        torch.testing.assert_close(carry["model"]["params"][f"{name}.weight"], value.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", [{"stop_gradient": False}, {"predictor": False}])
def test_the_recipe_passes_ablations_on_and_they_matter(options: Any) -> None:
    model = tiny.MODELS_WITH_HEADS["convnet"]
    common: Any = {"lr": 0.05, "epochs": 2, "batch_size": 4, "mu": 1.0}
    ablated = list(run(fedsiam_da(**common, **options), tiny.engine(model), rounds=2, seed=1))
    whole = list(run(fedsiam_da(**common), tiny.engine(model), rounds=2, seed=1))
    batched = list(run(fedsiam_da(**common, **options), tiny.engine(model, lane="batched"), rounds=2, seed=1))
    assert tiny.gap(ablated[-1].model, whole[-1].model) > 1e-6
    assert tiny.gap(ablated[-1].model, batched[-1].model) < 1e-12


def test_without_the_predictor_a_model_needs_none() -> None:
    class Headless(tiny.Backbone):
        """features and head alone."""

    model = lambda: tiny.seeded(lambda: Headless(tiny.mlp()))  # type: ignore[arg-type]  # noqa: E731
    assert tiny.finite(list(run(fedsiam_da(predictor=False), tiny.engine(model), rounds=1))[-1].model)
    with pytest.raises(Invalid, match=r"has no predict\(z\)"):
        list(run(fedsiam_da(), tiny.engine(model), rounds=1))


# --- siamese training under swapping ----------------------------------------------------------------------------------


def test_swapping_takes_siamese_clients() -> None:
    common: Any = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01, "batch_size": 4}
    for build in (simfedswap, fedswap):
        algorithm = build(training=Siamese(mu=0.3, predictor=False), h1=2, **common)
        assert isinstance(algorithm.server, Swapping) and isinstance(algorithm.client, SiameseTraining)
        alone = fedsiam_da(mu=0.3, predictor=False, epochs=2, **common).client
        assert algorithm.client == alone  # h1 = 2 steps of one epoch
    engine = tiny.engine(tiny.MODELS_WITH_HEADS["mlp"])
    rounds = list(run(simfedswap(training="siamese", **common), engine, rounds=3, seed=1))  # type: ignore[arg-type]
    plain = list(run(simfedswap(**common), engine, rounds=3, seed=1))
    assert tiny.finite(rounds[-1].snapshot.server) and rounds[0].notes["model_of"].tolist() != [0, 1, 2, 3, 4]
    assert tiny.gap(rounds[-1].model, plain[-1].model) > 1e-6
    with pytest.raises(Invalid, match=r"personal_layers = .* has no effect with training"):
        simfedswap(training=Siamese(), personal_layers=Normalisation())
    with pytest.raises(Invalid, match="sequential = True has no effect with freeze_global"):
        simfedswap(training={"name": "siamese", "sequential": True, "freeze_global": True})  # type: ignore[arg-type]


def test_a_config_swaps_siamese_clients_as_python_does(tmp_path: Path) -> None:
    settings = (
        *("rounds=3", "threads=1", "engine.lane=serial", "partition.clients=4", f"runs={tmp_path}"),
        *("model=siamese", "model.backbone=mlp", "model.backbone_options={hidden=[16]}", "model.projection=8"),
        *("algorithm=simfedswap", "algorithm.training={name='siamese', mu=0.2, history='round'}"),
        *("algorithm.lr=0.1", "algorithm.epochs=1", "algorithm.batch_size=16"),
    )
    loaded = config.load(None, settings)
    assert (
        loaded.algorithm.built.client
        == simfedswap(training=Siamese(mu=0.2, history="round"), lr=0.1, batch_size=16).client
    )
    history = runner.execute(loaded).history
    assert [row["round"] for row in history] == [1, 2, 3] and history[-1]["accuracy"] > 0.1
