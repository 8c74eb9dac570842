"""The server's training of FedGen's generator: Adam, with the gradient written out.

Backpropagation by PyTorch takes more than twice as many operations, and the generator is so small that their number is
what costs time. Nothing here reads a value on the host, so that a GPU's operations can be recorded. All of it can be
differentiated, for learned weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from consilience.core import rng
from consilience.core.tree import Tree
from consilience.task.latent import draw_labels

LEAVES = ("label", "noise", "bias", "output", "shift")  # the first three form one matrix, see `Draw.inputs`
FIRST, SECOND, TINY = 0.9, 0.999, 1e-8  # Adam's
LEAST = 1e-37  # in place of 0, whose root has no derivative; far too little to change a step


class Settings(Protocol):
    """What `Generator` says about the training."""

    @property
    def noise_size(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def lr(self) -> float: ...

    @property
    def diversity(self) -> float: ...


class Heads(NamedTuple):
    """The clients' classifiers, one below the other."""

    weight: Tensor  # [m C, d]
    bias: Tensor | None  # [m C]


class Draw(NamedTuple):
    """The inputs of one step; stacked [S, ...] for several."""

    inputs: Tensor  # [n, C + e + 1]: the label as one-hot row, noise, and 1 for the bias
    labels: Tensor  # [n, 1, C] one-hot
    expertise: Tensor  # [n, m, 1] each client's share of the row's label, divided by n
    apart: Tensor  # [n, n] mean squared distances of the noise, times 2 / (n^2 d)


def trained(params: Tree, weight: Tensor, bias: Tensor | None, counts: Tensor, key: Tensor, settings: Settings) -> Tree:
    """The generator after Adam's steps.

    weight: [m, C, d]; bias: [m, C]; counts: [m, C] float64, how many rows of each label a client has; key: [].
    """
    known = counts.sum(0)
    expertise = (counts / known.clamp(min=1)).to(weight.dtype)
    draws = drawn(known / known.sum(), expertise, key, weight.shape[2], settings)
    heads = Heads(weight.flatten(0, 1), None if bias is None else bias.flatten())
    sizes = [params[name].numel() for name in LEAVES]
    end = adam(torch.cat([params[name].flatten() for name in LEAVES]), draws, heads, settings)
    return {name: leaf.view_as(params[name]) for name, leaf in zip(LEAVES, end.split_with_sizes(sizes))}


def drawn(shares: Tensor, expertise: Tensor, key: Tensor, latent: int, settings: Settings) -> Draw:
    """The draws of all steps at once, with what does not depend on the generator."""
    steps, size, kind = settings.steps, settings.batch_size, expertise.dtype
    counters = torch.arange(2 * steps, device=shares.device).reshape(-1, 2)
    keys = rng.fold(key, counters)  # [S, 2]
    labels = draw_labels(shares, keys[:, 0], size)  # [S, n]
    noise = rng.normals(keys[:, 1], size * settings.noise_size).reshape(steps, size, -1).to(kind)
    of_label = (labels.unsqueeze(2) == torch.arange(len(shares), device=shares.device)).to(kind)
    distance = torch.cdist(noise, noise, compute_mode="donot_use_mm_for_euclid_dist")
    return Draw(
        torch.cat([of_label, noise, noise.new_ones(steps, size, 1)], 2),
        of_label.unsqueeze(2),
        (expertise.T / size)[labels].unsqueeze(3),
        distance.square() * (2 / (settings.noise_size * size**2 * latent)),
    )


def adam(params: Tensor, draws: Draw, heads: Heads, settings: Settings) -> Tensor:
    """All parameters in one row, after one step for each draw."""
    mean, square = torch.zeros_like(params), torch.full_like(params, LEAST)
    for number, draw in enumerate(_each(draws), start=1):
        slope = slope_of(params, draw, heads, settings)
        mean = mean.lerp(slope, 1 - FIRST)
        square = (square * SECOND).addcmul(slope, slope, value=1 - SECOND)
        root = (1 - SECOND**number) ** 0.5  # the corrections of both moments are numbers, multiplied out
        rate = settings.lr * root / (1 - FIRST**number)
        params = params.addcdiv(mean, square.sqrt() + TINY * root, value=-rate)
    return params


def slope_of(params: Tensor, draw: Draw, heads: Heads, settings: Settings) -> Tensor:
    """The gradient of sum_k expertise_k CE(head_k(z), y) + diversity exp(-mean |e - e'|^2 |z - z'|), in one row."""
    hidden_size, latent = settings.hidden, heads.weight.shape[1]
    first, output, shift = params.split_with_sizes([draw.inputs.shape[1] * hidden_size, hidden_size * latent, latent])
    output = output.view(hidden_size, latent)
    hidden = (draw.inputs @ first.view(-1, hidden_size)).relu()  # [n, h]
    z = torch.addmm(shift, hidden, output)  # [n, d]

    scores = z @ heads.weight.T if heads.bias is None else torch.addmm(heads.bias, z, heads.weight.T)
    wrong = scores.view(len(z), -1, draw.labels.shape[2]).softmax(2) - draw.labels  # [n, m, C]
    taught = (wrong * draw.expertise).flatten(1) @ heads.weight  # [n, d]

    # `apart` is symmetric: the mean of |e - e'|^2 |z - z'| is the sum of (z - z_0) pull, and its gradient is pull
    gaps = z.unsqueeze(1) - z  # [n, n, d]
    pull = torch.bmm(draw.apart.unsqueeze(1), gaps.sign()).squeeze(1)  # [n, d]
    alike = (gaps[0] * pull).sum().exp()
    of_z = taught.addcmul(pull, alike, value=-settings.diversity)

    of_hidden = torch.ops.aten.threshold_backward(of_z @ output.T, hidden, 0)
    return torch.cat([(draw.inputs.T @ of_hidden).flatten(), (hidden.T @ of_z).flatten(), of_z.sum(0)])


def _each(draws: Draw) -> Iterator[Draw]:
    """One step's after another."""
    return (Draw(*parts) for parts in zip(*(part.unbind() for part in draws)))
