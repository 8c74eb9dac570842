"""FedAF: condensation that agrees with other clients, and a server that keeps to their soft labels."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.algorithms.fedaf import fedaf
from consilience.algorithms.feddm import feddm
from consilience.client import SGD, Proximal
from consilience.client.condensation import Condensation
from consilience.client.condensed_rows import first_rows
from consilience.core.exchange import Cohort
from consilience.core.plans import Batch
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.server.rules.knowledge_matching import KnowledgeMatching, divergence
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")
DOUBLE = torch.float64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def batch_of(x: Tensor, y: Tensor, mask: Tensor | None = None, key: int = 7) -> Batch:
    return Batch(x=x, y=y, mask=mask, key=torch.tensor(key), first=torch.tensor(True))


def told(task: Task, logits: Tensor, classes: list[float]) -> Tree:
    known = {"logits": logits, "classes": torch.tensor(classes, dtype=DOUBLE)}
    return {"model": task.start(), "known": known, "round": torch.tensor(0)}


# --- the client ------------------------------------------------------------------------------------------------------


def test_one_step_of_condensation_by_hand() -> None:
    """A linear model z = W s + b: class c in the batch moves by W^T (2 (mean z(s) - mean z(x)) + a 2/C (.. - V_c)) / n.

    V_c pulls where it is known; the only row of class 1 is padding, so its synthetic rows stay.
    """
    module = tiny.seeded(lambda: nn.Linear(4, 3)).double()
    task, rule = Task(module), Condensation(per_class=2, keep=1.0, agreement=0.6, clip=None, solver=SGD(lr=0.3))
    v = random(3, 3, seed=3)
    message = told(task, v, [1, 1, 0])
    s, x, y = random(3, 2, 4, seed=1), random(5, 4, seed=2), torch.tensor([0, 2, 2, 0, 1])
    mask = torch.tensor([1.0, 1, 1, 1, 0], dtype=DOUBLE)
    carry = rule.begin(task, message, {})
    after = rule.step(task, {**carry, "x": s, "steps": carry["steps"] + 1}, batch_of(x, y, mask), message, {})
    weight, bias = module.weight.detach(), module.bias.detach()
    total = 0.0
    for c, rows, known in ((0, [0, 3], 1.0), (2, [1, 2], 0.0)):
        mine, theirs = weight @ s[c].mean(0) + bias, weight @ x[rows].mean(0) + bias
        slope = 2 * (mine - theirs) + known * 0.6 * 2 / 3 * (mine - v[c])
        torch.testing.assert_close(after["x"][c], s[c] - 0.3 * (weight.T @ slope) / 2, rtol=0, atol=1e-12)
        total += float((mine - theirs).square().sum() + known * 0.6 * (mine - v[c]).square().mean())
    assert torch.equal(after["x"][1], s[1])
    assert float(after["loss"]) == pytest.approx(total, abs=1e-12)


def test_the_agreement_term_is_the_sliced_wasserstein_distance() -> None:
    """Between two points, the mean over random directions of the squared 1-d distance tends to |u - v|^2 / C."""
    u, v = random(5, seed=1), random(5, seed=2)
    directions = F.normalize(random(200_000, 5, seed=3), dim=1)
    sliced = (directions @ (u - v)).square().mean()
    assert float(sliced) == pytest.approx(float((u - v).square().mean()), rel=0.01)


def test_gradients_are_clipped_by_their_norm() -> None:
    rule = Condensation(clip=2.0)
    long, short = random(3, 2, 4), random(3, 2, 4) / 100
    assert float(rule._clipped({"x": long * 10})["x"].norm()) == pytest.approx(2.0)
    assert torch.equal(rule._clipped({"x": short})["x"], short)


def test_models_are_resampled_by_the_share_that_is_kept() -> None:
    """keep w + (1 - keep) w~, where w~ has the deviation of PyTorch's initial weights; biases stay."""
    module = tiny.seeded(lambda: nn.Linear(300, 200)).double()
    params = Task(module).start()["params"]
    moved = Condensation(keep=0.25)._resampled(params, torch.tensor(3))
    fresh = (moved["weight"] - 0.25 * params["weight"]) / 0.75
    assert float(fresh.std()) == pytest.approx(float(params["weight"].std()), rel=0.02)
    assert float(fresh.mean()) == pytest.approx(0, abs=1e-3)
    assert torch.equal(moved["bias"], params["bias"])
    assert Condensation(keep=1.0)._resampled(params, torch.tensor(3)) is params


def test_means_to_start_from_are_averages_of_rows_of_their_class() -> None:
    """Each is the mean of some subset of the class's live rows; a class with one row starts at that row."""
    x, y = random(6, 4, seed=2), torch.tensor([0, 2, 2, 0, 1, 0])
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=DOUBLE)
    rows = first_rows(torch.zeros(3, 8, 4, dtype=DOUBLE), batch_of(x, y, mask), "means")
    for c, members in ((0, [0, 3]), (2, [1, 2])):
        one, other = x[members[0]], x[members[1]]
        choices = torch.stack([one, other, (one + other) / 2])
        assert ((rows[c].unsqueeze(1) - choices).abs().amax(2).amin(1) < 1e-12).all()
        assert len(rows[c].unique(dim=0)) > 1
    torch.testing.assert_close(rows[1], x[4].expand(8, 4))
    padded = first_rows(torch.zeros(3, 8, 4, dtype=DOUBLE), batch_of(x[:5], y[:5]), "means")
    torch.testing.assert_close(padded, rows)


def test_clients_report_class_means_of_their_rows_under_the_received_model() -> None:
    engine = tiny.engine()
    algorithm = fedaf(batch_size=4, epochs=1, per_class=2, shape=(1, 6, 6), server_steps=2, temperature=3.0)
    (one,) = run(algorithm, engine, rounds=1, seed=1)
    data, start = tiny.federation(), engine.start()
    for k in range(len(tiny.SIZES)):
        x, y = data.train.of(k)
        output = engine.task.apply(start, x.double(), train=False)[0]
        for c in y.unique().tolist():
            torch.testing.assert_close(one.cohort.reply["logits"][k, c], output[y == c].mean(0))
            soft = (output[y == c] / 3.0).softmax(1).mean(0)
            torch.testing.assert_close(one.cohort.reply["probabilities"][k, c], soft)


# --- the server ------------------------------------------------------------------------------------------------------


def replies(labels: list[list[float]], examples: list[float], seed: int = 4) -> Cohort:
    shares = torch.tensor(labels, dtype=DOUBLE)
    count, classes = shares.shape
    return Cohort(
        reply={
            "x": random(count, classes, 2, 36, seed=seed),
            "labels": shares,
            "logits": random(count, classes, classes, seed=seed + 1),
            "probabilities": random(count, classes, classes, seed=seed + 2).softmax(2),
        },
        ids=np.arange(count),
        examples=torch.tensor(examples, dtype=DOUBLE),
        steps=np.ones(count, dtype=np.int64),
        round=0,
    )


def test_what_is_known_of_a_class_is_the_mean_over_all_rows_and_stays_until_heard_again() -> None:
    rule, start = KnowledgeMatching(), tiny.engine().start()
    state = rule.init(start, 2)
    assert rule.broadcast(state, np.arange(2)).shared["known"]["classes"].tolist() == [0, 0, 0]
    first = replies([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]], [10, 4])
    state, _ = rule.update(state, first)
    logits = first.reply["logits"]
    torch.testing.assert_close(state["known"]["logits"][0], (5 * logits[0, 0] + 1 * logits[1, 0]) / 6)
    torch.testing.assert_close(state["known"]["logits"][1], (5 * logits[0, 1] + 3 * logits[1, 1]) / 8)
    assert state["known"]["classes"].tolist() == [1, 1, 0]
    second = replies([[0.0, 0.0, 1.0]], [3], seed=9)
    after, _ = rule.update(state, second)
    torch.testing.assert_close(after["known"]["logits"][:2], state["known"]["logits"][:2])
    torch.testing.assert_close(after["known"]["logits"][2], second.reply["logits"][0, 2])


def test_the_divergence_is_the_mean_of_both_kullback_leibler_divergences() -> None:
    output, labels = random(7, 3, seed=1), torch.tensor([0, 0, 1, 1, 1, 0, 1])
    told = random(3, 3, seed=2).softmax(1)
    found = divergence(output, labels, told, torch.tensor([True, True, True]), 2.0)
    parts = []
    for c in (0, 1):  # nobody of class 2 is in the batch
        own = (output[labels == c] / 2.0).softmax(1).mean(0)
        parts.append(
            (F.kl_div(own.log(), told[c], reduction="sum") + F.kl_div(told[c].log(), own, reduction="sum")) / 2
        )
    assert float(found) == pytest.approx(float(sum(parts)) / 2, abs=1e-12)
    unheard = divergence(output, labels, told, torch.tensor([True, False, True]), 2.0)
    assert float(unheard) == pytest.approx(float(parts[0]), abs=1e-12)
    certain = divergence(1e4 * output, labels, torch.eye(3, dtype=DOUBLE), torch.tensor([True] * 3), 1.0)
    assert bool(certain.isfinite())


def test_the_server_trains_on_rows_and_soft_labels() -> None:
    """Against torch.optim.SGD on the same objective, in one batch."""
    engine, cohort = tiny.engine(), replies([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]], [6, 6])
    rule = KnowledgeMatching(steps=4, lr=0.1, momentum=0.9, weight=0.7, temperature=2.0)
    found = rule.train(engine.task, rule.init(engine.start(), 2), cohort)["model"]["params"]
    rows = cohort.reply["x"]
    x, y = torch.cat([rows[0, 0], rows[0, 1], rows[1, 1], rows[1, 2]]), torch.tensor([0, 0, 1, 1, 1, 1, 2, 2])
    soft = cohort.reply["probabilities"]
    wanted = torch.stack([soft[0, 0], (soft[0, 1] + soft[1, 1]) / 2, soft[1, 2]])
    module = tiny.mlp().double()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimiser.zero_grad()
        output = module(x)
        own = torch.stack([(output[y == c] / 2).softmax(1).mean(0) for c in range(3)])
        apart = F.kl_div(own.log(), wanted, reduction="sum") + F.kl_div(wanted.log(), own, reduction="sum")
        (F.cross_entropy(output, y) + 0.7 * apart / 6).backward()
        optimiser.step()
    assert tiny.gap(found, {name: p.detach() for name, p in module.named_parameters()}) <= 1e-12


def test_without_its_two_terms_only_what_is_known_distinguishes_it() -> None:
    """agreement = knowledge = 0, keep = 1, no clipping is FedDM at radius 0, to the last bit."""
    options = {"shape": (1, 6, 6), "per_class": 2, "server_steps": 3, "batch_size": 4, "epochs": 2, "lr": 0.1}
    same = fedaf(agreement=0.0, knowledge=0.0, keep=1.0, clip=None, start="noise", **options)
    usual = feddm(radius=0.0, optimiser="sgd", **options)
    for one, other in zip(*(list(run(a, tiny.engine(), rounds=3, seed=1)) for a in (same, usual))):
        assert tiny.same(one.model, other.model)


def test_the_terms_reach_the_model() -> None:
    options = {"shape": (1, 6, 6), "per_class": 2, "server_steps": 3, "batch_size": 4, "epochs": 2}
    models = {}
    for name, changes in {"neither": {"agreement": 0.0, "knowledge": 0.0}, "agreement": {"knowledge": 0.0}}.items():
        models[name] = [one.model for one in run(fedaf(**options, **changes), tiny.engine(), rounds=2, seed=1)]
    assert tiny.same(models["neither"][0], models["agreement"][0]), "nothing is known before the first round"
    assert tiny.gap(models["neither"][1], models["agreement"][1]) > 1e-8


def test_fedaf_refuses_what_it_cannot_use() -> None:
    with pytest.raises(Invalid, match=r"fedaf.terms = .* has no effect in fedaf"):
        fedaf(terms=(Proximal(),))
    with pytest.raises(Invalid, match=r"shape is missing: .* shape = \[1, 28, 28\]"):
        list(run(fedaf(), tiny.engine(tiny.convnet), rounds=1))
    batch = batch_of(torch.ones(2, 4, dtype=torch.int64), torch.tensor([0, 1]))
    with pytest.raises(Invalid, match=r"the rows of this data set are whole numbers: load features"):
        first_rows(torch.zeros(2, 1, 4), batch, "noise")
    with pytest.raises(Invalid, match=r"the rows of this data set are several parts: load one alone"):
        first_rows(torch.zeros(2, 1, 4), batch._replace(x={"text": batch.x}), "noise")
    for shape in ((5,), (2, 18)):
        with pytest.raises(Invalid, match=r"shape = .* of a condensed row does not fit rows of shape \[1, 6, 6\]"):
            list(run(fedaf(shape=shape), tiny.engine(), rounds=1))
    with pytest.raises(Invalid, match=r"condensation needs class numbers"):
        Condensation().check_against(Task(nn.Linear(3, 1), "regression"))
