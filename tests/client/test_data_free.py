"""FedGen and FedDM: learning from what clients know, without their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.feddm import feddm
from consilience.algorithms.fedgen import fedgen
from consilience.client import SGD
from consilience.client.condensed_rows import first_rows
from consilience.client.distribution_matching import DistributionMatching
from consilience.client.terms.generated_features import GeneratedFeatures
from consilience.client.terms.term import Context
from consilience.core import rng
from consilience.core.algorithm import Algorithm
from consilience.core.exchange import Cohort
from consilience.core.plans import Batch
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.server.rules.synthetic_training import SyntheticTraining
from consilience.task.latent import classifier, draw_labels, new_generator
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")
DOUBLE = torch.float64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def batch_of(x: Tensor, y: Tensor, mask: Tensor | None = None, key: int = 7) -> Batch:
    return Batch(x=x, y=y, mask=mask, key=torch.tensor(key), first=torch.tensor(True))


# --- what both sides share -------------------------------------------------------------------------------------------


def test_the_classifier_is_the_last_layer() -> None:
    assert classifier(tiny.engine(tiny.convnet).start()["params"]) == ("9.weight", "9.bias")
    with pytest.raises(Invalid, match=r"last layer .* is not a linear classifier"):
        classifier(Task(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))).start()["params"])


def test_labels_are_drawn_by_their_shares() -> None:
    drawn = draw_labels(torch.tensor([0.5, 0.0, 0.2, 0.3]), torch.tensor(3), 20_000)
    shares = torch.bincount(drawn, minlength=4) / 20_000
    assert shares.tolist() == pytest.approx([0.5, 0.0, 0.2, 0.3], abs=0.015) and shares[1] == 0


def test_normal_draws_are_normal() -> None:
    drawn = rng.normals(torch.arange(50), 1001).flatten().numpy()
    assert drawn.mean() == pytest.approx(0, abs=0.02) and drawn.std() == pytest.approx(1, abs=0.02)
    assert (np.abs(drawn) < 1).mean() == pytest.approx(0.6827, abs=0.01)
    assert torch.equal(rng.normals(torch.tensor(4), 9), rng.normals(torch.arange(5), 9)[4])


# --- FedGen ----------------------------------------------------------------------------------------------------------


def term_value(term: GeneratedFeatures, ready: float, mask: Tensor | None, rows: int = 5, round: int = 2) -> Any:
    module = tiny.seeded(lambda: nn.Linear(4, 3)).double()
    task = Task(module)
    params = task.start()["params"]
    told = {
        "params": new_generator(3, 4, noise=6, hidden=5, like=params["weight"]),
        "labels": torch.tensor([0.2, 0.0, 0.8], dtype=DOUBLE),
        "ready": torch.tensor(ready, dtype=DOUBLE),
    }
    x, y = random(5, 4)[:rows], torch.tensor([0, 2, 2, 1, 0])[:rows]
    message = {"generator": told, "round": torch.tensor(round)}

    def value(params: Tree) -> Tensor:
        output, _ = task.apply({"params": params, "buffers": {}}, x, train=True)
        return term(params, Context(task, message, {}, {}, output), batch_of(x, y, mask))

    return value, params, told, x, y


def test_fedgens_terms_by_hand() -> None:
    """Features, cross-entropy and divergence from their definitions; the target of the divergence is a constant."""
    term = GeneratedFeatures(alpha=2.0, beta=3.0, decay=0.5, count=4)
    value, params, told, x, y = term_value(term, 1.0, None)
    key = torch.tensor(7)

    def features(labels: Tensor, purpose: int) -> Tensor:
        noise = torch.stack([rng.normals(rng.fold(rng.fold(key, purpose), i), 6) for i in range(len(labels))])
        g = told["params"]
        hidden = torch.stack([(g["label"][c] + e @ g["noise"] + g["bias"]).clamp(min=0) for c, e in zip(labels, noise)])
        return hidden @ g["output"] + g["shift"]

    drawn = draw_labels(told["labels"], rng.fold(key, 2**33), 4)
    weight, bias = (params[name].clone().requires_grad_() for name in ("weight", "bias"))
    logits = features(drawn, 2**33 + 1) @ weight.T + bias
    taught = -logits.log_softmax(1)[torch.arange(4), drawn].mean()
    with torch.no_grad():
        target = (features(y, 2**33 + 2) @ weight.T + bias).softmax(1)
    mine = (x @ weight.T + bias).log_softmax(1)
    apart = (target * (target.log() - mine)).sum(1).mean()
    expected = 0.25 * (2 * taught + 3 * apart)  # 0.5 to the power of round 2
    expected.backward()
    assert value(params).item() == pytest.approx(expected.item(), abs=1e-12)
    slope = torch.func.grad(value)(params)
    torch.testing.assert_close(slope["weight"], weight.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(slope["bias"], bias.grad, rtol=0, atol=1e-12)


def test_fedgens_terms_leave_out_padding_and_an_untrained_generator() -> None:
    term = GeneratedFeatures(count=4)
    whole, params, *_ = term_value(term, 1.0, None, rows=3)
    padded, _, *_ = term_value(term, 1.0, torch.tensor([1.0, 1, 1, 0, 0], dtype=DOUBLE))
    assert padded(params).item() == pytest.approx(whole(params).item(), abs=1e-13)
    untrained, _, *_ = term_value(term, 0.0, None)
    assert untrained(params).item() == 0


def test_clients_tell_the_shares_of_their_labels() -> None:
    data = tiny.federation()
    (one,) = run(fedgen(batch_size=4, epochs=2), tiny.engine(), rounds=1, seed=1)
    for k in range(len(tiny.SIZES)):
        _, y = data.train.of(k)
        shares = torch.bincount(y, minlength=3).double() / len(y)
        torch.testing.assert_close(one.cohort.reply["labels"][k], shares)
    held = torch.bincount(data.train.y, minlength=3).double() / len(data.train.y)
    ledger = one.snapshot.server["ledgers"]["generator"]
    torch.testing.assert_close(ledger["labels"], held)
    assert ledger["ready"] == 1


def test_in_its_first_round_fedgen_is_fedavg() -> None:
    first = [next(iter(run(recipe(batch_size=4), tiny.engine(), rounds=1, seed=1))) for recipe in (fedgen, fedavg)]
    assert tiny.gap(first[0].model, first[1].model) <= 1e-15


# --- FedDM -----------------------------------------------------------------------------------------------------------


def test_one_step_of_matching_by_hand() -> None:
    """A linear model: s <- s - lr (2/n) W^T W (mean s_c - mean x_c) for classes in the batch, others stay."""
    module = tiny.seeded(lambda: nn.Linear(4, 3)).double()
    task = Task(module)
    rule = DistributionMatching(per_class=2, radius=0.0, solver=SGD(lr=0.3))
    message = {"model": task.start(), "round": torch.tensor(0)}
    carry = rule.begin(task, message, {})
    assert carry["x"].shape == (3, 2, 4)
    s = random(3, 2, 4, seed=1)
    x, y = random(5, 4, seed=2), torch.tensor([0, 2, 2, 0, 1])
    mask = torch.tensor([1.0, 1, 1, 1, 0], dtype=DOUBLE)  # the only row of class 1 is padding
    carry = {**carry, "x": s, "steps": carry["steps"] + 1}
    after = rule.step(task, carry, batch_of(x, y, mask), message, {})
    weight = module.weight.detach()
    for c, rows in ((0, [0, 3]), (2, [1, 2])):
        gap = s[c].mean(0) - x[rows].mean(0)
        torch.testing.assert_close(after["x"][c], s[c] - 0.3 * weight.T @ weight @ gap, rtol=0, atol=1e-12)
    assert torch.equal(after["x"][1], s[1])
    assert after["labels"].tolist() == [2, 0, 2]


def test_rows_to_start_from_are_of_their_class() -> None:
    x, y = random(6, 4, seed=2), torch.tensor([0, 2, 2, 0, 2, 0])
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=DOUBLE)
    rows = first_rows(torch.zeros(3, 4, 4, dtype=DOUBLE), batch_of(x, y, mask), "rows")
    for c, members in ((0, [0, 3, 0, 3]), (2, [1, 2, 4, 1])):
        assert (rows[c] - x[members]).abs().max() < 0.06


def test_models_to_match_under_are_within_the_radius() -> None:
    params = tiny.engine().start()["params"]
    rule = DistributionMatching(radius=2.0)
    lengths = []
    for key in range(40):
        moved = rule._nearby(params, torch.tensor(key))
        lengths.append(float(sum((moved[n] - params[n]).square().sum() for n in params)) ** 0.5)
    assert max(lengths) <= 2.0 + 1e-9 and np.mean(lengths) == pytest.approx(1.0, abs=0.25)


def synthetic(known: list[list[float]]) -> Cohort:
    shares = torch.tensor(known, dtype=DOUBLE)
    return Cohort(
        reply={"x": random(len(known), 3, 2, 36, seed=4), "labels": shares},
        ids=np.arange(len(known)),
        examples=torch.ones(len(known), dtype=DOUBLE),
        steps=np.ones(len(known), dtype=np.int64),
        round=0,
    )


def test_the_server_trains_on_the_classes_that_clients_have() -> None:
    """Against torch.optim.SGD on the same rows, in one batch."""
    engine = tiny.engine()
    cohort = synthetic([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    rule = SyntheticTraining(steps=5, lr=0.1, momentum=0.9, weight_decay=0.01)
    found = rule.train(engine.task, rule.init(engine.start(), 2), cohort)["model"]["params"]
    x = torch.cat([cohort.reply["x"][0, 0], cohort.reply["x"][0, 1], cohort.reply["x"][1, 2]])
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    module = tiny.mlp().double()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(5):
        optimiser.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimiser.step()
    assert tiny.gap(found, {name: p.detach() for name, p in module.named_parameters()}) <= 1e-12


def test_the_server_stays_within_the_radius_and_needs_something_to_learn_from() -> None:
    engine = tiny.engine()
    start = engine.start()
    rule = SyntheticTraining(steps=30, lr=1.0, radius=0.5)
    found = rule.train(engine.task, {"model": start}, synthetic([[0.2, 0.4, 0.4]]))["model"]["params"]
    length = float(sum((found[n] - start["params"][n]).square().sum() for n in found)) ** 0.5
    assert length == pytest.approx(0.5, abs=1e-9)
    nothing = rule.train(engine.task, {"model": start}, synthetic([[0.0, 0.0, 0.0]]))
    assert tiny.same(nothing["model"], start)


def test_feddm_refuses_what_has_no_models_to_act_on() -> None:
    from consilience.client import Proximal

    with pytest.raises(Invalid, match=r"feddm.terms = .* has no effect in feddm"):
        feddm(terms=(Proximal(),))
    with pytest.raises(Invalid, match=r"shape is missing: .* shape = \[1, 28, 28\]"):
        list(run(feddm(), tiny.engine(tiny.convnet), rounds=1))


# --- do they help? ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "gain"),
    [
        (fedgen(lr=0.1, epochs=3, batch_size=16), 0.05),
        (feddm(per_class=5), 0.05),
    ],
    ids=["fedgen", "feddm"],
)
def test_under_strong_label_skew_it_beats_fedavg(algorithm: Algorithm, gain: float) -> None:
    """`digits`, Dirichlet 0.05 over ten clients, five rounds: the mean over three seeds of the final accuracy."""
    usual = fedavg(lr=0.1, epochs=3, batch_size=16)
    found, others = (np.mean([accuracy(a, seed) for seed in range(3)]) for a in (algorithm, usual))
    assert found > others + gain


def accuracy(algorithm: Algorithm, seed: int) -> float:
    from consilience import models
    from consilience.data import datasets
    from consilience.data.federate import federate
    from consilience.data.partition import PARTITIONS
    from consilience.engines.vectorised.engine import Vectorised
    from consilience.experiments.evaluation import evaluate

    data = datasets.load("digits")
    federation, _ = federate(data, PARTITIONS["dirichlet"](clients=10, alpha=0.05), seed=seed)
    task = Task(models.build("mlp", tuple(data.x.shape[1:]), 10, seed=seed, hidden=(64,)))
    engine = Vectorised(task, federation, device="cpu", lane="batched", clients_at_once=10)
    *_, last = run(algorithm, engine, rounds=5, seed=seed)
    found = evaluate(engine.task, last.model, engine.store("test"))["accuracy"]
    assert found is not None
    return found
