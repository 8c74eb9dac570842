"""FedSiam-DA's client against gradients worked out by hand and against plain PyTorch modules and optimisers."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.fedsiam_da import fedsiam_da
from consilience.channel import Chain, Clip, Quantise
from consilience.client import SGD, LocalTraining, Proximal
from consilience.client.cosine import cosine
from consilience.client.memory.models import PreviousModel
from consilience.client.personal_layers import Normalisation
from consilience.client.siamese_training import SiameseTraining
from consilience.client.terms.contrastive import Contrastive
from consilience.core import plans, tree
from consilience.core.federation import Federation
from consilience.core.plans import Batch, Work
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.experiments import runner
from consilience.experiments.assembly import assemble
from consilience.experiments.config import config
from consilience.server import Averaging, SimProxWeights
from consilience.task.task import Task

INPUTS, DEPTH, CLASSES = 5, 4, 3
MU = 0.3


class Linear(nn.Module):
    """z = A x, p = H z, logits = C z: every gradient can be written down."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(INPUTS, DEPTH, bias=False)
        self.prediction = nn.Linear(DEPTH, DEPTH, bias=False)
        self.head = nn.Linear(DEPTH, CLASSES, bias=False)

    def features(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def predict(self, z: Tensor) -> Tensor:
        return self.prediction(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


Weights = dict[str, np.ndarray]


def drawn(seed: int) -> Weights:
    draw = np.random.default_rng(seed)
    shapes = {"encoder": (DEPTH, INPUTS), "prediction": (DEPTH, DEPTH), "head": (CLASSES, DEPTH)}
    return {name: draw.normal(size=shape) for name, shape in shapes.items()}


def as_tree(weights: Weights) -> tree.Tree:
    return {"params": {f"{name}.weight": torch.tensor(value) for name, value in weights.items()}, "buffers": {}}


def as_arrays(model: tree.Tree) -> Weights:
    return {name.removesuffix(".weight"): value.numpy() for name, value in model["params"].items()}


def cosines_by_hand(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row cosines, and their gradient with respect to a: (b/|b| - cos a/|a|) / |a|."""
    long, other = np.linalg.norm(a, axis=1, keepdims=True), np.linalg.norm(b, axis=1, keepdims=True)
    value = (a * b).sum(1, keepdims=True) / (long * other)
    return value[:, 0], (b / other - value * a / long) / long


def local_gradient(w: Weights, x: np.ndarray, y: np.ndarray, z_copy: np.ndarray, z_past: np.ndarray | None) -> Weights:
    """d/dw of ce + MU (cos(z_past, z) - 1/2 cos(p, z_copy)), by the chain rule, without the copy's term."""
    rows = len(x)
    z = x @ w["encoder"].T
    p, logits = z @ w["prediction"].T, z @ w["head"].T
    odds = np.exp(logits - logits.max(1, keepdims=True))
    errors = (odds / odds.sum(1, keepdims=True) - np.eye(CLASSES)[y]) / rows
    d_p = -0.5 * MU / rows * cosines_by_hand(p, z_copy)[1]
    d_z = errors @ w["head"] + d_p @ w["prediction"]
    if z_past is not None:
        d_z = d_z + MU / rows * cosines_by_hand(z, z_past)[1]
    return {"encoder": d_z.T @ x, "prediction": d_p.T @ z, "head": errors.T @ z}


def copy_gradient(copied: Weights, x: np.ndarray, z: np.ndarray) -> Weights:
    """d/dw' of -MU/2 cos(p', z): nothing reaches the classifier."""
    z_copy = x @ copied["encoder"].T
    d_p = -0.5 * MU / len(x) * cosines_by_hand(z_copy @ copied["prediction"].T, z)[1]
    d_z = d_p @ copied["prediction"]
    return {"encoder": d_z.T @ x, "prediction": d_p.T @ z_copy, "head": np.zeros_like(copied["head"])}


def moved(w: Weights, gradient: Weights, lr: float) -> Weights:
    return {name: value - lr * gradient[name] for name, value in w.items()}


def message(model: tree.Tree) -> tree.Tree:
    return {"model": model, "round": torch.tensor(0)}


def batch(seed: int, *, rows: int = 6, first: bool = True, mask: Tensor | None = None) -> Batch:
    draw = np.random.default_rng(seed)
    x, y = torch.tensor(draw.normal(size=(rows, INPUTS))), torch.tensor(draw.integers(0, CLASSES, rows))
    return Batch(x=x, y=y, mask=mask, key=torch.tensor(1), first=torch.tensor(first))


def close(model: tree.Tree, expected: Weights) -> None:
    for name, value in as_arrays(model).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-14, err_msg=name)


def rule(**options: Any) -> SiameseTraining:
    return SiameseTraining(**{"solver": SGD(lr=0.7), "mu": MU, **options})


def remembered(weights: Weights, known: bool = True) -> tree.Tree:
    return {"previous": {"model": as_tree(weights), "known": torch.tensor(known)}}


# --- one step, by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", ["joint", "sequential", "frozen"])
def test_steps_on_a_linear_network_follow_the_hand_derived_gradients(kind: str, known: bool) -> None:
    """Three steps of one epoch: the copy moves on its own term, the client on the other three."""
    start, past = drawn(1), drawn(2)
    client = rule(sequential=kind == "sequential", freeze_global=kind == "frozen")
    task, memory = Task(Linear()), remembered(past, known)
    carry = client.begin(task, message(as_tree(start)), memory)
    w, copied = start, start
    for number in range(3):
        now = batch(number, first=number == 0)
        carry = client.step(task, carry, now, message(as_tree(start)), memory)
        x, y = now.x.numpy(), now.y.numpy()
        ahead = moved(copied, copy_gradient(copied, x, x @ w["encoder"].T), 0.7)
        seen = {"joint": copied, "sequential": ahead, "frozen": start}[kind]
        gradient = local_gradient(w, x, y, x @ seen["encoder"].T, x @ past["encoder"].T if known else None)
        w, copied = moved(w, gradient, 0.7), ahead
        close(carry["model"], w)
        if kind != "frozen":
            close(carry["copy"], copied)
    assert ("copy" in carry) == (kind != "frozen")


def test_stopped_gradients_are_exactly_zero() -> None:
    """Labels never reach the copy's classifier, the copy's term never the client, whatever its prediction head is."""
    start = drawn(1)
    task, memory, client = Task(Linear()), remembered(drawn(2)), rule()
    carry = client.begin(task, message(as_tree(start)), memory)
    once = client.step(task, carry, batch(0), message(as_tree(start)), memory)
    assert torch.equal(once["copy"]["params"]["head.weight"], carry["copy"]["params"]["head.weight"])
    assert not torch.equal(once["copy"]["params"]["encoder.weight"], carry["copy"]["params"]["encoder.weight"])

    # p' = H' z' enters only -1/2 cos(p', sg z): another H' changes the copy's step but not one bit of the client's
    other = dict(carry["copy"]["params"], **{"prediction.weight": torch.tensor(drawn(9)["prediction"])})
    twisted = {**carry, "copy": {"params": other, "buffers": {}}}
    again = client.step(task, twisted, batch(0), message(as_tree(start)), memory)
    assert tiny.same(again["model"], once["model"])
    assert not torch.equal(again["copy"]["params"]["encoder.weight"], once["copy"]["params"]["encoder.weight"])

    # z_past is a constant: the past model itself is untouched
    assert tiny.same(once["past"]["model"], memory["previous"]["model"])

    # without the stop at z the client would go elsewhere, by much more than rounding
    x, z = batch(0).x.numpy(), batch(0).x.numpy() @ start["encoder"].T
    leak = -0.5 * MU / len(x) * cosines_by_hand(z, z @ start["prediction"].T)[1]
    assert np.abs(leak.T @ x).max() > 1e-3


def test_a_client_without_a_past_ignores_what_stands_in_for_it() -> None:
    start, task = drawn(1), Task(Linear())
    ends = []
    for seed in (2, 3):
        memory = remembered(drawn(seed), known=False)
        carry = rule().begin(task, message(as_tree(start)), memory)
        ends.append(rule().step(task, carry, batch(0), message(as_tree(start)), memory)["model"])
    assert tiny.same(ends[0], ends[1])


@pytest.mark.parametrize("history", ["epoch", "round"])
def test_the_past_is_the_end_of_the_last_epoch_or_of_the_last_round(history: Any) -> None:
    """Two epochs of two steps each: by epoch, the model after step two is the past of steps three and four."""
    start, past = drawn(1), drawn(2)
    task, memory, client = Task(Linear()), remembered(past), rule(history=history, freeze_global=True)
    carry = client.begin(task, message(as_tree(start)), memory)
    w, expected_past = start, past
    for number in range(4):
        now = batch(number, first=number % 2 == 0)
        if number == 2 and history == "epoch":
            expected_past = w
        carry = client.step(task, carry, now, message(as_tree(start)), memory)
        x, y = now.x.numpy(), now.y.numpy()
        z_copy, z_past = x @ start["encoder"].T, x @ expected_past["encoder"].T
        w = moved(w, local_gradient(w, x, y, z_copy, z_past), 0.7)
        close(carry["model"], w)
    reply, kept = client.end(task, carry, message(as_tree(start)), memory)
    close(reply["model"], w)
    close(kept["previous"]["model"], w)
    assert bool(kept["previous"]["known"])


def test_padding_has_no_part_in_the_losses() -> None:
    start, task, memory = drawn(1), Task(Linear()), remembered(drawn(2))
    short, padded = batch(0, rows=4), batch(5, rows=7)
    x = torch.cat([short.x, padded.x[4:]])
    live = Batch(x, torch.cat([short.y, padded.y[4:]]), torch.tensor([1.0] * 4 + [0.0] * 3), short.key, short.first)
    ends = []
    for one in (short, live):
        carry = rule().begin(task, message(as_tree(start)), memory)
        ends.append(rule().step(task, carry, one, message(as_tree(start)), memory))
    assert tiny.gap(ends[0], ends[1]) < 1e-14


# --- whole rounds, against modules and optimisers --------------------------------------------------------------------

ROWS, ROUNDS, EPOCHS, BATCH, SEED = 11, 3, 2, 4, 3


def in_torch(module: Any, data: Federation, **options: Any) -> tuple[tree.Tree, Any]:
    """The method as an ordinary training script, for one client that takes part in every round."""
    model, previous = module.train(), None
    for round in range(ROUNDS):
        steps = np.array([EPOCHS * -(-ROWS // BATCH)])
        plan = plans.draw(Work(batch_size=BATCH), data.train, np.array([0]), steps, seed=SEED, round=round)
        copied = copy.deepcopy(model)
        received = copy.deepcopy(model).eval()
        opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        copy_opt = torch.optim.SGD(copied.parameters(), lr=0.05, momentum=0.9)
        for step in range(int(steps[0])):
            now = plan.single(step, 0, data.train)
            if step and bool(now.first) and options.get("history", "epoch") == "epoch":
                previous = copy.deepcopy(model).eval()
            one_step(model, copied, received, previous, opt, copy_opt, now, **options)
        previous = copy.deepcopy(model).eval()
    return {
        "params": {n: p.detach() for n, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }, previous


def one_step(
    model: Any, copied: Any, received: Any, previous: Any, opt: Any, copy_opt: Any, now: Batch, **options: Any
) -> None:
    def closer(p: Tensor, z: Tensor) -> Tensor:
        return -0.5 * F.cosine_similarity(p, z.detach(), eps=1e-30).mean()

    def local(z_copy: Tensor) -> tuple[Tensor, Tensor]:
        z = model.features(now.x)
        loss = F.cross_entropy(model.head(z), now.y) + MU * closer(model.predict(z), z_copy)
        if previous is not None:
            loss = loss + MU * F.cosine_similarity(previous.features(now.x).detach(), z, eps=1e-30).mean()
        return loss, z

    opt.zero_grad()
    copy_opt.zero_grad()
    if options.get("freeze_global"):
        loss, _ = local(received.features(now.x))
        loss.backward()
    elif options.get("sequential"):
        aside = copy.deepcopy(model)
        z = aside.features(now.x)
        (MU * closer(copied.predict(copied.features(now.x)), z)).backward()
        copy_opt.step()
        loss, _ = local(copy.deepcopy(copied).features(now.x))
        loss.backward()
    else:
        z_copy = copied.features(now.x)
        loss, z = local(z_copy)
        (loss + MU * closer(copied.predict(z_copy), z)).backward()
        copy_opt.step()
    opt.step()


def normed() -> nn.Module:
    """Batch norm in the backbone and in the prediction head."""
    return tiny.with_heads(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))
    ).double()


def federated(client: Any, data: Federation, **engine: Any) -> list[Any]:
    options = {"device": "cpu", "dtype": "float64", "lane": "serial", "clients_at_once": 8, **engine}
    made = Vectorised(Task(normed()), data, **options)
    return list(run(dataclasses.replace(fedavg(), client=client), made, rounds=ROUNDS, seed=SEED))


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    "options", [{}, {"sequential": True}, {"freeze_global": True}, {"history": "round"}], ids=lambda o: str(o)
)
def test_rounds_equal_an_ordinary_training_script(options: dict[str, Any]) -> None:
    """Momentum for both, weight decay for the client alone, batch norm in every mode, history over three rounds."""
    data = tiny.federation((ROWS,))
    solver, work = SGD(lr=0.05, momentum=0.9, weight_decay=0.01), Work(epochs=EPOCHS, batch_size=BATCH)
    client = SiameseTraining(
        solver=solver, copy_solver=dataclasses.replace(solver, weight_decay=0.0), work=work, mu=MU, **options
    )
    *_, last = federated(client, data)
    expected, previous = in_torch(normed(), data, **options)
    assert tiny.gap(last.model, expected) < 1e-12
    past = tree.rows(last.snapshot.memory["client"]["previous"]["model"], 0)
    assert tiny.gap(past["params"], {n: p.detach() for n, p in previous.named_parameters()}) < 1e-12


@pytest.mark.usefixtures("untraced")
def test_mu_zero_is_plain_local_training() -> None:
    data, solver, work = tiny.federation((7, 3, 9)), SGD(lr=0.05, momentum=0.9), Work(epochs=2, batch_size=4)
    siamese = federated(SiameseTraining(solver=solver, work=work, mu=0.0, terms=(Proximal(mu=0.2),)), data)
    plain = federated(LocalTraining(solver=solver, work=work, terms=(Proximal(mu=0.2),)), data)
    mine, theirs = siamese[-1].cohort.reply, plain[-1].cohort.reply
    assert tiny.gap(mine["model"]["params"], theirs["model"]["params"]) < 1e-13
    assert tiny.gap({"loss": mine["loss"]}, {"loss": theirs["loss"]}) < 1e-13
    # the prediction head is idle there, and so are its statistics
    used = {name for name in mine["model"]["buffers"] if not name.startswith("prediction")}
    assert used and all(
        torch.allclose(mine["model"]["buffers"][name], theirs["model"]["buffers"][name], atol=1e-13) for name in used
    )


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    "options", [{"sequential": True, "per_layer": True}, {"history": "round", "compare_on": "updates"}]
)
def test_lanes_agree_over_several_epochs(options: dict[str, Any]) -> None:
    """Clients of unequal size are in different epochs at the same step."""
    data = tiny.federation((9, 4, 1, 12))
    algorithm = fedsiam_da(mu=MU, lr=0.05, momentum=0.5, epochs=3, batch_size=4, **options)
    models = []
    for lane in ("serial", "batched", "streams"):
        engine = tiny.engine(normed, data, lane=lane)
        *_, last = run(algorithm, engine, rounds=3, seed=SEED)
        models.append({"model": last.model, "memory": last.snapshot.memory})
    assert tiny.gap(models[1], models[0]) < 1e-12
    assert tiny.gap(models[2], models[0]) < 1e-12


# --- what could break ------------------------------------------------------------------------------------------------


def test_a_row_without_direction_has_cosine_zero_and_no_gradient() -> None:
    a = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    value = cosine(a, b)
    assert value.tolist() == pytest.approx([0, 0, 0.5**0.5])
    value.sum().backward()
    assert a.grad is not None and b.grad is not None
    assert a.grad[:2].tolist() == b.grad[:2].tolist() == [[0, 0], [0, 0]]
    assert a.grad[2].tolist() == pytest.approx([0, 0.5**0.5])  # (b/|b| - cos a/|a|) / |a|


def test_empty_pictures_train_to_finite_values() -> None:
    """z = A x is the zero vector for every row: only the classifier could learn, and it gets nothing either."""
    start, task, memory = drawn(1), Task(Linear()), remembered(drawn(2))
    dark = batch(0)._replace(x=torch.zeros(6, INPUTS, dtype=torch.float64))
    carry = rule().begin(task, message(as_tree(start)), memory)
    after = rule().step(task, carry, dark, message(as_tree(start)), memory)
    assert tiny.finite(after)
    close(after["model"], start)


@pytest.mark.usefixtures("untraced")
def test_an_idle_client_returns_what_it_got_and_keeps_its_memory() -> None:
    data = tiny.federation((6, 6))
    client = SiameseTraining(work=Work(batch_size=4))
    rounds = federated(client, data, environment=Environment(steps=(0, 2)))
    memory = rounds[-1].snapshot.memory["client"]["previous"]
    assert memory["known"].tolist() == [False, True]
    start = Vectorised(Task(normed()), data, device="cpu", dtype="float64").start()
    assert tiny.same(tree.rows(memory["model"], 0), start)
    sent = tree.rows(rounds[-1].cohort.reply["model"], 0)
    assert tiny.same(sent, rounds[-2].model)


def test_a_model_without_heads_is_refused_by_name() -> None:
    with pytest.raises(Invalid, match=r"Sequential has no features\(x\).*model.name = 'siamese'"):
        list(run(fedsiam_da(), tiny.engine(tiny.mlp), rounds=1))

    class Featured(Linear):
        predict = None  # type: ignore[assignment]

    with pytest.raises(Invalid, match=r"algorithm: Perceptron has no predict\(z\), .*use model.name = 'siamese'"):
        assemble(config.load(None, ["algorithm=fedsiam_da", "model=mlp"]))  # before a run folder is made
    with pytest.raises(Invalid, match=r"Featured has no predict\(z\)"):
        rule().begin(Task(Featured()), message(as_tree(drawn(1))), remembered(drawn(2)))


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(Invalid, match="sequential = True has no effect with freeze_global"):
        fedsiam_da(sequential=True, freeze_global=True)
    with pytest.raises(Invalid, match="must hold PreviousModel"):
        SiameseTraining(memory=())
    with pytest.raises(Invalid, match="history = 'batch' is not one of epoch, round"):
        SiameseTraining(history="batch")  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"weighting = SimProxWeights\(...\) has no effect with per_layer = True"):
        fedsiam_da(per_layer=True, weighting=SimProxWeights())
    with pytest.raises(Invalid, match=r"personal_layers = .* has no effect in fedsiam_da"):
        fedsiam_da(personal_layers=Normalisation())
    with pytest.raises(Invalid, match="compare_on = 'updates' has no effect with weighting = SimProxWeights"):
        fedsiam_da(compare_on="updates", weighting=SimProxWeights())


def test_the_recipe_keeps_weight_decay_from_the_copy() -> None:
    client = fedsiam_da(lr=0.1, momentum=0.9, weight_decay=1e-5).client
    assert isinstance(client, SiameseTraining)
    assert client.solver == SGD(lr=0.1, momentum=0.9, weight_decay=1e-5)
    assert client.copy_solver == SGD(lr=0.1, momentum=0.9)
    assert client.memory == (PreviousModel(),)


# --- together with other parts ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"weighting": SimProxWeights()}, {"model", "loss"}),
        ({"weighting": SimProxWeights(previous_model="own")}, {"model", "loss", "moved"}),
        ({"channel": Chain(channels=(Clip(bound=0.5), Quantise(bits=8)))}, {"model", "loss"}),
        ({"terms": (Contrastive(mu=0.5),), "compare_on": "updates"}, {"model", "loss"}),
    ],
    ids=["simprox", "simprox, own past", "clip and quantise", "moon's term"],
)
def test_other_parts_meet_siamese_training(options: Any, fields: set[str]) -> None:
    common: Any = {"lr": 0.05, "epochs": 2, "batch_size": 4}
    with_part = list(run(fedsiam_da(**common, **options), tiny.engine(normed), rounds=2, seed=1))
    without = list(run(fedsiam_da(**common), tiny.engine(normed), rounds=2, seed=1))
    assert set(with_part[-1].cohort.reply) == fields
    assert tiny.finite(with_part[-1].model)
    assert tiny.gap(with_part[-1].model, without[-1].model) > 1e-8


def test_a_config_gives_siamese_training_the_weights_of_simprox(tmp_path: Path) -> None:
    settings = (
        *("rounds=2", "threads=1", "engine.lane=serial", "partition.clients=4", f"runs={tmp_path}"),
        *("model=siamese", "model.backbone=mlp", "model.backbone_options={hidden=[16]}", "model.projection=8"),
        *("algorithm=fedsiam_da", "algorithm.weighting=simprox", "algorithm.channel={name='quantise', bits=8}"),
    )
    experiment = assemble(config.load(None, settings))
    assert isinstance(experiment.algorithm.client, SiameseTraining)
    assert isinstance(experiment.algorithm.server, Averaging)
    assert experiment.algorithm.server.weighting == SimProxWeights()
    history = runner.execute(config.load(None, [*settings, "evaluation.local=true"])).history
    assert [row["round"] for row in history] == [1, 2] and history[-1]["local_accuracy_mean"] > 0.1
