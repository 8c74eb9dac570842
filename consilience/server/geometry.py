"""Distances and angles between stacked models: one Gram matrix by matrix products, in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from consilience.core.checks import Invalid
from consilience.core.tree import Tree


class Geometry(NamedTuple):
    """How m models lie relative to each other and to the model they started from."""

    distance: Tensor  # [m, m] |w_i - w_j|
    movement: Tensor  # [m] |w_i - anchor|
    dot: Tensor  # [m, m] <w_i, w_j> / scale^2
    anchor_dot: Tensor  # [m] <w_i, anchor> / scale^2
    anchor_norm: Tensor  # scalar |anchor| / scale


def measure(stacked: Tree, anchor: Tree) -> Geometry:
    """Geometry of stacked parameters [m, ...] around `anchor`.

    Rows are taken relative to the first model: squared distances of nearly equal models then lose no digits to
    cancellation, and those of equal models are exactly zero. Values are scaled by a power of two near the largest one,
    so that squares of huge entries cannot overflow and no digit is lost.
    """
    some = next(iter(stacked.values()))
    scale = _power_of_two([*stacked.values(), *anchor.values()])
    m = len(some)
    gram = torch.zeros(m + 2, m + 2, dtype=torch.float64, device=some.device)
    moved = torch.zeros(m, dtype=torch.float64, device=some.device)
    for name, value in stacked.items():
        w = value.reshape(m, -1).to(torch.float64) / scale  # [m, p]
        g = anchor[name].reshape(1, -1).to(torch.float64) / scale
        moved += (w - g).square().sum(1)
        block = torch.cat([w - w[:1], w[:1], g])  # rows: m differences, reference, anchor
        gram += block @ block.T
    inner, to_reference, to_anchor = gram[:m, :m], gram[:m, m], gram[:m, m + 1]
    squares = inner.diagonal()
    distance = (squares[:, None] + squares[None, :] - 2 * inner).clamp(min=0).sqrt()
    distance.fill_diagonal_(0)
    return Geometry(
        distance=distance * scale,
        movement=moved.sqrt() * scale,
        dot=gram[m, m] + to_reference[:, None] + to_reference[None, :] + inner,
        anchor_dot=gram[m, m + 1] + to_anchor,
        anchor_norm=gram[m + 1, m + 1].sqrt(),
    )


def _power_of_two(values: list[Tensor]) -> Tensor:
    largest = torch.stack([v.abs().max().to(torch.float64) for v in values if v.numel()]).max()
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)


def cosines(geometry: Geometry, ids: object) -> tuple[Tensor, Tensor]:
    """([m, m] between models, [m] to the anchor); a model of zero length is refused, since it has no direction."""
    norms = geometry.dot.diagonal().clamp(min=0).sqrt()
    if bool((norms == 0).any()) or float(geometry.anchor_norm) == 0:
        who = "the global model" if float(geometry.anchor_norm) == 0 else f"a model of clients {ids}"
        raise Invalid(f"{who} is all zeros, so its cosine similarity is undefined: start from a random initial model")
    between = (geometry.dot / (norms[:, None] * norms[None, :])).clamp(-1, 1)
    to_anchor = (geometry.anchor_dot / (norms * geometry.anchor_norm)).clamp(-1, 1)
    return between, to_anchor
