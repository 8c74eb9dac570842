"""MOON's model-contrastive loss against numbers worked out by hand and against a plain training script."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.moon import moon
from consilience.client.memory.models import PreviousModel
from consilience.client.terms.contrastive import Contrastive
from consilience.client.terms.one_pass import with_features
from consilience.client.terms.term import Context
from consilience.core import plans, tree
from consilience.core.plans import Batch, Work
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.selection import Everyone
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")


class Linear(nn.Module):
    """z = A x, logits = C z."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 2, bias=False)
        self.head = nn.Linear(2, 2, bias=False)

    def features(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def model(encoder: Any) -> tree.Tree:
    values = {"encoder.weight": encoder, "head.weight": np.eye(2)}
    return {"params": {n: torch.tensor(np.asarray(v), dtype=torch.float64) for n, v in values.items()}, "buffers": {}}


def value_and_gradient(
    term: Contrastive, mine: Any, received: Any, last: Any, x: Any, *, known: bool = True, mask: Any = None
) -> tuple[float, np.ndarray, Tensor]:
    memory = {"previous": {"model": model(last), "known": torch.tensor(known)}}
    rows = torch.tensor(np.asarray(x), dtype=torch.float64)
    batch = Batch(rows, torch.zeros(len(rows), dtype=torch.int64), mask, torch.tensor(0), torch.tensor(True))
    context = Context(Task(Linear()), {"model": model(received)}, memory, {}, torch.zeros(1))
    params = model(mine)["params"]
    gradient = grad(lambda p: term(p, context, batch))(params)
    return float(term(params, context, batch)), gradient["encoder.weight"].numpy(), gradient["head.weight"]


# z = A x for x = e_1 is A's first column: z = (1, 0), z_glob = (0, 1), z_prev = (1, 1)/sqrt 2
MINE, RECEIVED, LAST = [[1, 0, 0], [0, 1, 0]], [[0, 0, 0], [1, 0, 0]], [[1, 0, 0], [1, 0, 0]]
ONE = [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("temperature", [0.5, 0.1, 2.0])
@pytest.mark.parametrize("mu", [1.0, 5.0, 0.0])
def test_loss_and_gradient_of_one_row_by_hand(mu: float, temperature: float) -> None:
    """a = 0, b = 1/sqrt 2: loss = mu log(1 + e^{b/T}); da/dz = (0, 1), db/dz = (0, 1/sqrt 2)."""
    b = 0.5**0.5
    loss, gradient, head = value_and_gradient(Contrastive(mu=mu, temperature=temperature), MINE, RECEIVED, LAST, ONE)
    assert loss == pytest.approx(mu * np.log1p(np.exp(b / temperature)), rel=1e-14)
    share = 1 / (1 + np.exp(-b / temperature))  # how much the softmax prefers the wrong model
    d_z = mu * share / temperature * np.array([0.0, b - 1.0])
    np.testing.assert_allclose(gradient, np.outer(d_z, ONE[0]), rtol=1e-13, atol=1e-15)
    assert not head.any(), "the classifier is no part of the representation"


@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_of_a_batch_by_the_chain_rule(seed: int) -> None:
    draw = np.random.default_rng(seed)
    mine, received, last, x = (draw.normal(size=shape) for shape in ((2, 3), (2, 3), (2, 3), (5, 3)))
    z = x @ mine.T

    def cosines(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        long, other = np.linalg.norm(z, axis=1, keepdims=True), np.linalg.norm(b, axis=1, keepdims=True)
        value = (z * b).sum(1, keepdims=True) / long / other
        return value, b / (long * other) - value * z / long**2

    (good, d_good), (bad, d_bad) = cosines(x @ received.T), cosines(x @ last.T)
    odds = np.exp(np.hstack([good, bad]) / 0.4)
    wrong = odds[:, 1:] / odds.sum(1, keepdims=True)
    expected = 2.0 * np.mean(-np.log(1 - wrong))
    d_z = 2.0 / len(x) * wrong * (d_bad - d_good) / 0.4
    term = Contrastive(mu=2, temperature=0.4)
    loss, gradient, _ = value_and_gradient(term, mine, received, last, x)
    assert loss == pytest.approx(expected, rel=1e-13)
    np.testing.assert_allclose(gradient, d_z.T @ x, rtol=1e-12, atol=1e-14)
    # two padded rows that would otherwise count
    padded, mask = np.vstack([x, draw.normal(size=(2, 3))]), torch.tensor([1.0] * 5 + [0.0] * 2)
    again, same, _ = value_and_gradient(term, mine, received, last, padded, mask=mask)
    assert again == pytest.approx(expected, rel=1e-13)
    np.testing.assert_allclose(same, d_z.T @ x, rtol=1e-12, atol=1e-14)


def test_it_is_zero_where_there_is_no_last_model_and_where_both_models_agree() -> None:
    loss, gradient, _ = value_and_gradient(Contrastive(), MINE, RECEIVED, LAST, ONE, known=False)
    assert loss == 0 and not gradient.any()
    loss, gradient, _ = value_and_gradient(Contrastive(), MINE, LAST, LAST, ONE)
    assert loss == pytest.approx(np.log(2)) and not gradient.any()


def test_extreme_temperatures_and_empty_rows_stay_finite() -> None:
    loss, gradient, _ = value_and_gradient(Contrastive(temperature=1e-3), MINE, RECEIVED, LAST, ONE)
    assert loss == pytest.approx(0.5**0.5 / 1e-3)  # log(1 + e^707) without overflow
    assert np.isfinite(gradient).all()
    loss, gradient, _ = value_and_gradient(Contrastive(), MINE, RECEIVED, LAST, [[0.0, 0.0, 0.0]])
    assert loss == pytest.approx(np.log(2)) and not gradient.any()


def normed() -> nn.Module:
    layers = (nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return tiny.Backbone(nn.Sequential(*layers)).double()


def test_rounds_equal_an_ordinary_training_script() -> None:
    """The authors' loop: cosine logits, cross-entropy with label 0, other models in evaluation mode."""
    rows, epochs, size, rounds = 11, 2, 4, 3
    data = tiny.federation((rows,))
    module: Any = tiny.seeded(normed).train()
    last = None
    for round in range(rounds):
        steps = np.array([epochs * -(-rows // size)])
        plan = plans.draw(Work(batch_size=size), data.train, np.array([0]), steps, seed=3, round=round)
        received = copy.deepcopy(module).eval()
        opt = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        for step in range(int(steps[0])):
            now = plan.single(step, 0, data.train)
            z = module.features(now.x)
            loss = F.cross_entropy(module.head(z), now.y)
            if last is not None:
                others = [received.features(now.x).detach(), last.features(now.x).detach()]
                logits = torch.stack([F.cosine_similarity(z, other) for other in others], 1) / 0.3
                loss = loss + 2 * F.cross_entropy(logits, torch.zeros(len(z), dtype=torch.int64))
            opt.zero_grad()
            loss.backward()
            opt.step()
        last = copy.deepcopy(module).eval()
    algorithm = moon(mu=2, temperature=0.3, lr=0.05, momentum=0.9, epochs=epochs, batch_size=size)
    *_, done = run(algorithm, tiny.engine(lambda: tiny.seeded(normed), data), rounds=rounds, seed=3)
    expected = {
        "params": {n: p.detach() for n, p in module.named_parameters()},
        "buffers": dict(module.named_buffers()),
    }
    assert tiny.gap(done.model, expected) < 1e-12


def test_the_first_round_and_mu_zero_are_fedavg() -> None:
    common: Any = {"lr": 0.1, "batch_size": 4, "selection": Everyone()}
    heads = tiny.MODELS_WITH_HEADS["mlp"]
    plain = list(run(fedavg(**common), tiny.engine(heads), rounds=3, seed=1))
    idle = list(run(moon(mu=0, **common), tiny.engine(heads), rounds=3, seed=1))
    real = list(run(moon(mu=5, **common), tiny.engine(heads), rounds=3, seed=1))
    assert tiny.gap(idle[-1].model, plain[-1].model) < 1e-14
    assert tiny.gap(real[0].model, plain[0].model) < 1e-14
    assert tiny.gap(real[1].model, plain[1].model) > 1e-4


def test_what_it_cannot_work_with_is_refused() -> None:
    with pytest.raises(Invalid, match=r"Sequential has no features\(x\) method, whose values Contrastive compares"):
        list(run(moon(), tiny.engine(tiny.mlp), rounds=1))
    with pytest.raises(Invalid, match="Contrastive reads the client's memory 'previous', but the client keeps none"):
        fedavg(terms=(Contrastive(),))
    assert fedavg(terms=(Contrastive(),), memory=(PreviousModel(),)) == moon() == moon(memory=(PreviousModel(),))
    with pytest.raises(Invalid, match=r"temperature = 0\.0 is out of range"):
        moon(temperature=0)


class OwnWay(nn.Module):
    """A forward pass that does not call `features`, or calls it with something else."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.head, self.how = nn.Linear(4, 3), nn.Linear(3, 2), how

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "apart":
            return self.head(self.body(x).tanh())
        if self.how == "twice":
            return self.head(self.features(x)) + self.head(self.features(x))
        return self.head(self.features(x if self.how == "once" else 2 * x))


@pytest.mark.parametrize(("how", "calls"), [("once", 1), ("apart", 1), ("twice", 3), ("changed", 2)])
def test_one_pass_gives_output_and_features(monkeypatch: pytest.MonkeyPatch, how: str, calls: int) -> None:
    """Whatever the forward pass does, both are those of separate calls; `features` is called no more than needed."""
    module, x, seen = OwnWay(how), torch.randn(5, 4), []
    expected = module(x), module.features(x)
    own = OwnWay.features
    monkeypatch.setattr(OwnWay, "features", lambda self, x: seen.append(1) or own(self, x))
    output, z = with_features(module, x)
    assert torch.equal(output, expected[0]) and torch.equal(z, expected[1])
    assert len(seen) == calls and "features" not in vars(module)
