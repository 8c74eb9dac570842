"""Torch's random operations drawn from a key: values, statistics, positions, refusals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from consilience.core.settings import Invalid
from consilience.layers.randomness import KeyedDraws
from consilience.task.task import Task

N = 20_000
X = torch.full((N,), 0.3, dtype=torch.float64)


def drawn(call: Callable[[], Any], key: int = 7, mask: Tensor | None = None) -> Any:
    with KeyedDraws(torch.tensor(key), mask):
        return call()


# operation, mean, variance of what it draws
MOMENTS: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    "rand": (lambda: torch.rand(N), 1 / 2, 1 / 12),
    "rand in two dimensions": (lambda: torch.rand((N // 4, 4), dtype=torch.float64), 1 / 2, 1 / 12),
    "randn": (lambda: torch.randn(100, N // 100, dtype=torch.float64), 0, 1),
    "rand_like": (lambda: torch.rand_like(X), 1 / 2, 1 / 12),
    "randn_like": (lambda: torch.randn_like(X, dtype=torch.float32), 0, 1),
    "randint": (lambda: torch.randint(3, 9, (N,)), 5.5, 35 / 12),
    "randint to": (lambda: torch.randint(6, (N,)), 2.5, 35 / 12),
    "randint_like": (lambda: torch.randint_like(X, 6), 2.5, 35 / 12),
    "bernoulli": (lambda: torch.bernoulli(X), 0.3, 0.21),
    "Tensor.bernoulli": (lambda: X.bernoulli(0.6), 0.6, 0.24),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.3), 0.3, 0.21),
    "bernoulli_ of a tensor": (lambda: torch.empty(N).bernoulli_(X), 0.3, 0.21),
    "normal": (lambda: torch.normal(2.0, 3.0, (N,)), 2, 9),
    "normal of tensors": (lambda: torch.normal(X, 2 * torch.ones(N)), 0.3, 4),
    "normal_": (lambda: torch.empty(N).normal_(1.0, std=2.0), 1, 4),
    "uniform_": (lambda: torch.empty(N).uniform_(-1, 3), 1, 16 / 12),
    "exponential_": (lambda: torch.empty(N).exponential_(2.0), 1 / 2, 1 / 4),
    "geometric_": (lambda: torch.empty(N).geometric_(0.4), 2.5, 3.75),
    "log_normal_": (lambda: torch.empty(N).log_normal_(0, 0.5), math.exp(1 / 8), 0.364696),
    "random_": (lambda: torch.empty(N).random_(6), 2.5, 35 / 12),
    "multinomial": (lambda: torch.multinomial(torch.tensor([1.0, 0, 3]), N, True), 1.5, 0.75),
    "multinomial without": (lambda: torch.multinomial(torch.ones(N // 4, 3), 1).flatten().repeat(4), 1, 2 / 3),
    "dropout": (lambda: F.dropout(torch.ones(N), 0.2), 1, 0.25),
    "alpha_dropout": (lambda: F.alpha_dropout(drawn(lambda: torch.randn(N), 3), 0.2, True), 0, 1),
    "rrelu": (lambda: F.rrelu(-torch.ones(N), 0.1, 0.5, True), -0.3, 0.16 / 12),
    "gumbel": (lambda: -torch.empty(N, dtype=torch.float64).exponential_().log(), 0.5772156649, math.pi**2 / 6),
    "distributions": (lambda: torch.distributions.Normal(1.0, 2.0).sample((N,)), 1, 4),
    "float16": (lambda: torch.rand(N, dtype=torch.float16).float(), 1 / 2, 1 / 12),
}  # fmt: skip


@pytest.mark.parametrize("name", MOMENTS)
def test_mean_and_variance(name: str) -> None:
    call, mean, variance = MOMENTS[name]
    before = torch.get_rng_state()
    values = drawn(call)
    assert torch.equal(values, drawn(call)), "the same key, the same draws"
    assert not torch.equal(values, drawn(call, key=8))
    assert torch.equal(before, torch.get_rng_state()), "the global generator is not used"
    values = values.double()
    assert len(values.flatten()) in (N, N - N % 12)
    spread = values.std(correction=0)
    assert abs(float(values.mean()) - mean) < 5 * math.sqrt(variance / N) * (2 if "without" in name else 1)
    assert abs(float(spread**2) / variance - 1) < 0.1
    if (mean, variance) == (1 / 2, 1 / 12):
        assert float(values.min()) >= 0 and float(values.max()) < 1


def test_calls_of_a_pass_differ() -> None:
    first, second = drawn(lambda: (torch.rand(50), torch.rand(50)))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "call",
    [
        lambda n: torch.randn(n, 5, 3),
        lambda n: torch.randn(5, n, 3).transpose(0, 1),
        lambda n: torch.rand(3, 5, n).movedim(2, 0),
        lambda n: F.dropout(torch.ones(5, n, 3), 0.5).transpose(0, 1),
        lambda n: torch.randn(n),
        lambda n: torch.randint(0, 99, (2, n)).T,
        lambda n: F.dropout2d(torch.ones(n, 3, 2, 2), 0.5),
        lambda n: torch.bernoulli(torch.full((n, 7), 0.5)),
    ],
)
def test_a_row_draws_the_same_in_a_shorter_batch(call: Callable[[int], Tensor]) -> None:
    assert torch.equal(drawn(lambda: call(9))[:6], drawn(lambda: call(6)))


def test_permutations_leave_padding_where_it_is() -> None:
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0])
    order = drawn(lambda: torch.randperm(6), mask=mask)
    assert order[4:].tolist() == [4, 5]
    assert torch.equal(order[:4], drawn(lambda: torch.randperm(4)))
    assert sorted(drawn(lambda: torch.randperm(1000)).tolist()) == list(range(1000))
    assert drawn(lambda: torch.randperm(5, dtype=torch.int32)).dtype == torch.int32


def test_samples_without_replacement_are_distinct() -> None:
    picked = drawn(lambda: torch.multinomial(torch.tensor([0.0, 1, 2, 3]), 3))
    assert sorted(picked.tolist()) == [1, 2, 3]


def test_attention_with_dropout_is_attention_over_the_kept_weights() -> None:
    """By hand from the weights; and on average it is attention without dropout."""
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(2, 1, 5, 5) > 0.3
    mask[0, 0, 0] = False
    plain = F.scaled_dot_product_attention(q, k, v, mask)
    mean = torch.stack([drawn(lambda: F.scaled_dot_product_attention(q, k, v, mask, 0.2), i) for i in range(400)]).mean(
        0
    )
    assert float((mean - plain).abs().max()) < 0.4
    eye = torch.eye(5, dtype=torch.float64).expand(2, 3, 5, 5)
    weights = drawn(lambda: F.scaled_dot_product_attention(q, k, eye, dropout_p=0.2))  # those kept, scaled
    whole = F.scaled_dot_product_attention(q, k, eye)
    kept = weights > 0
    torch.testing.assert_close(weights[kept], whole[kept] / 0.8)
    assert 0.1 < float((~kept).double().mean()) < 0.32


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "bias": False}, {"batch_first": True}], ids=str)
def test_recurrent_dropout_is_between_the_layers(kind: type[nn.Module], options: dict[str, Any]) -> None:
    """With three layers of dropout p: layer, dropout, layer, dropout, layer, built by hand from single layers."""
    net = kind(4, 3, 3, dropout=0.3, **options).double()
    ways = 2 if options.get("bidirectional") else 1
    x = torch.randn(6, 5, 4, dtype=torch.float64)
    out, state = drawn(lambda: net(x))
    y, states = x, []
    with KeyedDraws(torch.tensor(7)):
        for layer in range(3):
            one = kind(4 if layer == 0 else 3 * ways, 3, **options).double()
            one.load_state_dict(
                {n: dict(net.named_parameters())[n.replace("l0", f"l{layer}")] for n in one.state_dict()}
            )
            y, end = one(y)
            states.append(end)
            y = F.dropout(y, 0.3) if layer < 2 else y
    torch.testing.assert_close(out, y, rtol=1e-12, atol=1e-12)
    if kind is nn.LSTM:
        assert all(torch.allclose(a, torch.cat(b)) for a, b in zip(state, zip(*states)))
    else:
        assert torch.allclose(state, torch.cat(states))
    quiet, _ = net.eval()(x)
    assert torch.allclose(drawn(lambda: net(x))[0], quiet)


class Drawing(nn.Module):
    """A layer that calls something in its forward pass."""

    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.call, self.head = call, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.call(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: torch.poisson(x.abs()), "poisson cannot be drawn from the batch's key"),
        (lambda x: torch.distributions.Gamma(1.0, 1.0).sample(), "_standard_gamma cannot be drawn"),
        (lambda x: torch.rand(3, generator=torch.Generator()), "rand draws from a generator of the module's own"),
        (lambda x: random.random(), "Drawing draws from Python's global generator"),
        (lambda x: np.random.rand(), "Drawing draws from NumPy's global generator"),
        (lambda x: torch.ops.aten.rand_like(x), r"draws from torch's global generator \(aten.rand_like.default\)"),
        (lambda x: nn.init.normal_(torch.empty(3)), r"torch's global generator \(aten.normal_.default\)"),
    ],
)
def test_what_cannot_be_replaced_is_refused_by_name(call: Callable[[Tensor], Any], message: str) -> None:
    task = Task(Drawing(call))
    for train in (True, False):
        with pytest.raises(Invalid, match=message):
            task.apply(task.start(), torch.ones(4, 3), train=train, key=torch.tensor(1))


def test_training_without_a_key_is_refused() -> None:
    task = Task(Drawing(torch.rand_like))
    with pytest.raises(Invalid, match=r"draws random numbers \(rand_like\) was trained without a key"):
        task.apply(task.start(), torch.ones(4, 3), train=True)


def test_evaluation_draws_are_the_same_every_time() -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    module.register_forward_hook(lambda m, i, out: out + torch.randn_like(out))
    task = Task(module)
    first, second = (task.apply(task.start(), torch.ones(4, 3), train=False)[0] for _ in "ab")
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("draws", [nn.Dropout(0.5), nn.RReLU()], ids=str)
def test_draws_inside_a_checkpoint_are_refused(draws: nn.Module) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    task = Task(Checkpointed(nn.Linear(3, 3), draws, nn.Linear(3, 2)))
    with pytest.raises(Invalid, match=r"inside torch.utils.checkpoint would be drawn anew"):
        task.apply(task.start(), torch.ones(4, 3), train=True, key=torch.tensor(1))
