"""FedGen's server: its gradient against PyTorch's, and its draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from consilience.core import rng
from consilience.core.tree import Tree
from consilience.server.averaging.ledgers.generator import Generator
from consilience.server.averaging.ledgers.generator_training import LEAVES, Draw, Heads, drawn, slope_of, trained
from consilience.task.latent import draw_labels, generate, new_generator

pytestmark = pytest.mark.usefixtures("untraced")
DOUBLE = torch.float64
SHAPES = [(3, 4, 5, 6, 7, 8), (1, 2, 1, 1, 1, 2), (7, 10, 64, 16, 12, 9), (4, 3, 9, 9, 2, 33)]  # m, C, d, h, e, n


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def counts_of(clients: int, classes: int) -> Tensor:
    """Clients that lack labels; with more than two labels, one that nobody has."""
    counts = torch.randint(0, 9, (clients, classes), generator=torch.Generator().manual_seed(3)).to(DOUBLE)
    counts[:, 0] += 1
    counts[1:, 1] = 0
    if classes > 2:
        counts[:, 2] = 0
    return counts


class Case:
    """A generator, classifiers and draws, and the loss by its definition."""

    def __init__(self, shape: tuple[int, ...], bias: bool) -> None:
        clients, classes, latent, hidden, noise, size = shape
        self.rule = Generator(noise_size=noise, hidden=hidden, batch_size=size, steps=50, diversity=0.7)
        self.weight = random(clients, classes, latent, seed=1)
        self.bias = random(clients, classes, seed=2) if bias else None
        self.counts = counts_of(clients, classes)
        made = new_generator(classes, latent, noise=noise, hidden=hidden, like=self.weight)
        self.params = {name: leaf + 0.1 * random(*leaf.shape, seed=5) for name, leaf in made.items()}
        self.shares = self.counts.sum(0) / self.counts.sum()
        self.expertise = self.counts / self.counts.sum(0).clamp(min=1)
        self.key = torch.tensor(rng.key(4, "generator", 2))
        self.draws = drawn(self.shares, self.expertise, self.key, latent, self.rule)

    def noted(self, step: int) -> tuple[Tensor, Tensor]:
        """Labels and noise of a step, each drawn by itself."""
        first, second = (rng.fold(self.key, 2 * step + part) for part in (0, 1))
        noise = rng.normals(second, self.rule.batch_size * self.rule.noise_size)
        return draw_labels(self.shares, first, self.rule.batch_size), noise.reshape(self.rule.batch_size, -1)

    def loss(self, params: Tree, labels: Tensor, noise: Tensor) -> Tensor:
        z = generate(params, labels, noise)
        scores = torch.einsum("nd,mcd->mnc", z, self.weight)
        scores = scores if self.bias is None else scores + self.bias.unsqueeze(1)
        wrong = F.cross_entropy(scores.movedim(2, 1), labels.expand(len(scores), -1), reduction="none")  # [m, n]
        taught = (self.expertise[:, labels] * wrong).sum(0).mean()
        apart = (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(2)
        return taught + 0.7 * torch.exp(-((z.unsqueeze(0) - z.unsqueeze(1)).abs().mean(2) * apart).mean())

    def slopes(self, step: int) -> tuple[Tensor, Tensor]:
        """The gradient written out, and PyTorch's."""
        inputs = {name: leaf.clone().requires_grad_() for name, leaf in self.params.items()}
        self.loss(inputs, *self.noted(step)).backward()
        flat = torch.cat([self.params[name].flatten() for name in LEAVES])
        heads = Heads(self.weight.flatten(0, 1), None if self.bias is None else self.bias.flatten())
        found = slope_of(flat, Draw(*(part[step] for part in self.draws)), heads, self.rule)
        return found, torch.cat([inputs[name].grad.flatten() for name in LEAVES])  # type: ignore[union-attr]


def silent(params: Tree) -> Tree:
    """All hidden units are dead, so that all features are equal."""
    return {**params, "bias": params["bias"] - 1e3}


def half_dead(params: Tree) -> Tree:
    """Some units are dead, one is exactly at zero."""
    bias = params["bias"].clone()
    bias[::2] -= 1e3
    first = bias.clone()
    first[-1] = 0
    zeroed = {name: params[name].clone() for name in ("label", "noise")}
    for leaf in zeroed.values():
        leaf[:, -1] = 0
    return {**params, **zeroed, "bias": first}


def alike(params: Tree) -> Tree:
    """Features depend on the label alone: rows of a label are equal to the bit, since no sum of quarters is rounded."""
    return {
        **{name: (4 * leaf).round() / 4 for name, leaf in params.items()},
        "noise": torch.zeros_like(params["noise"]),
    }


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("change", [dict, silent, half_dead, alike], ids=["plain", "silent", "half_dead", "alike"])
def test_the_gradient_is_that_of_the_loss(change: Callable[[Tree], Tree], shape: tuple[int, ...], bias: bool) -> None:
    case = Case(shape, bias)
    case.params = change(case.params)
    for step in range(3):
        found, expected = case.slopes(step)
        assert float((found - expected).norm()) <= 1e-12 * float(expected.norm())
        assert float(expected.norm()) > 0


def test_each_part_of_the_loss_reaches_the_gradient() -> None:
    """The comparison above would miss a term that is too small to count."""
    case = Case(SHAPES[0], True)
    found, _ = case.slopes(0)
    case.draws = case.draws._replace(apart=case.draws.apart * 0)
    without, _ = case.slopes(0)
    assert float((found - without).norm()) > 1e-3 * float(found.norm())


def test_labels_and_noise_are_those_of_single_draws() -> None:
    case = Case(SHAPES[2], True)
    classes = case.weight.shape[1]
    for step in (0, 1, 49):
        labels, noise = case.noted(step)
        rows = case.draws.inputs[step]
        assert torch.equal(rows[:, :classes].argmax(1), labels) and torch.equal(rows[:, classes:-1], noise)
        assert torch.equal(rows[:, :classes], case.draws.labels[step].squeeze(1)) and bool((rows[:, -1] == 1).all())
        assert bool((case.draws.labels[step].sum(2) == 1).all())


@pytest.mark.parametrize("bias", [True, False])
def test_fifty_steps_are_those_of_adam(bias: bool) -> None:
    case = Case(SHAPES[2], bias)
    mine = trained(case.params, case.weight, case.bias, case.counts, case.key, case.rule)
    inputs = {name: leaf.clone().requires_grad_() for name, leaf in case.params.items()}
    adam = torch.optim.Adam(inputs.values(), lr=case.rule.lr)
    for step in range(50):
        adam.zero_grad()
        case.loss(inputs, *case.noted(step)).backward()
        adam.step()
    assert tiny.gap(mine, {name: leaf.detach() for name, leaf in inputs.items()}) < 1e-12
    assert tiny.gap(mine, case.params) > 0.05


def test_it_can_be_differentiated_by_the_classifiers() -> None:
    """For learned weights: the gradient of what the generator becomes."""
    case = Case((2, 3, 4, 5, 2, 4), True)
    rule = Generator(noise_size=2, hidden=5, batch_size=4, steps=3)

    def end(weight: Tensor) -> Tensor:
        made = trained(case.params, weight, case.bias, case.counts, case.key, rule)
        return torch.stack([leaf.sum() for leaf in made.values()])

    assert torch.autograd.gradcheck(end, case.weight.clone().requires_grad_(), atol=1e-6)


class Kernels(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = op._schema.arguments
        self.count += not any(one.alias_info is not None and not one.alias_info.is_write for one in arguments)
        return op(*args, **(kwargs or {}))


def test_a_step_takes_few_operations() -> None:
    case, counts = Case(SHAPES[0], True), []
    for steps in (2, 12):
        rule = Generator(noise_size=7, hidden=6, batch_size=8, steps=steps)
        with Kernels() as kernels:
            trained(case.params, case.weight, case.bias, case.counts, case.key, rule)
        counts.append(kernels.count)
    assert counts[1] - counts[0] <= 10 * 27


def test_the_generator_learns_what_the_classifiers_agree_on() -> None:
    """Two clients, each an expert of its own labels: features of a label satisfy its expert."""
    heads = random(2, 4, 6, seed=5)
    counts = torch.tensor([[50.0, 50.0, 0, 0], [0, 0, 60.0, 40.0]], dtype=DOUBLE)
    rule = Generator(steps=150, hidden=32, noise_size=8)
    start = new_generator(4, 6, noise=8, hidden=32, like=heads)
    params = trained(start, heads, None, counts, torch.tensor(1), rule)
    y = torch.arange(4).repeat(25)
    z = generate(params, y, random(100, 8, seed=6))
    expert = torch.where(y < 2, 0, 1)
    logits = torch.einsum("nd,ncd->nc", z, heads[expert])
    assert (logits.argmax(1) == y).double().mean() > 0.95
