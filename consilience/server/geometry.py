"""Distances and angles between stacked models: Gram matrices by matrix products, in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core.checks import Invalid
from consilience.core.tree import Tree, rows

SURE = 1e-3  # a squared distance below this share of the squared norms it was taken from has lost digits


class Geometry(NamedTuple):
    """How m models lie relative to each other and to the model they started from."""

    distance: Tensor  # [m, m] |w_i - w_j|
    movement: Tensor  # [m] |w_i - anchor|
    cosine: Tensor  # [m, m] NaN where a model is all zeros
    anchor_cosine: Tensor  # [m]


def measure(stacked: Tree, anchor: Tree) -> Geometry:
    """Geometry of stacked parameters [m, ...] around `anchor`: O(m^2 P) at the speed of a matrix product."""
    distance, movement, sure = _around(stacked, anchor)
    if not bool(sure.all()):
        _refine(distance, sure.cpu().numpy(), stacked)
    everyone = {name: torch.cat([value, anchor[name].unsqueeze(0)]) for name, value in stacked.items()}
    gram, _ = _gram(everyone, None)
    norms = gram.diagonal().sqrt()
    cosine = (gram / (norms[:, None] * norms[None, :])).clamp(-1, 1)
    return Geometry(distance=distance, movement=movement, cosine=cosine[:-1, :-1], anchor_cosine=cosine[:-1, -1])


def cosines(geometry: Geometry, ids: list[int]) -> tuple[Tensor, Tensor]:
    """([m, m] between models, [m] to the anchor); a model of zero length is refused, since it has no direction."""
    if not bool(geometry.anchor_cosine.isfinite().all()):
        zeros = [ids[k] for k in torch.nonzero(geometry.cosine.diagonal().isnan()).flatten().tolist()]
        nowhere = bool(geometry.anchor_cosine.isnan().all())
        who = "the global model" if nowhere else f"the model of clients {zeros}"
        raise Invalid(f"{who} is all zeros, so its cosine similarity is undefined: start from a random initial model")
    return geometry.cosine, geometry.anchor_cosine


def _around(stacked: Tree, reference: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """([m, m] distances, [m] distances to the reference, [m, m] whether a distance kept its digits).

    |a - b|^2 = |a|^2 + |b|^2 - 2 <a, b> is taken relative to the reference, near which models lie, because it loses
    digits when a and b are much closer to each other than to the origin.
    """
    gram, scale = _gram(stacked, reference)
    unit = torch.maximum(scale[:, None], scale[None, :])
    left, right = scale[:, None] / unit, scale[None, :] / unit  # powers of two: exact, and squares cannot overflow
    squares = gram.diagonal()
    sums = left.square() * squares[:, None] + right.square() * squares[None, :]
    squared = (sums - 2 * left * right * gram).clamp(min=0)
    squared.fill_diagonal_(0)
    exact = (squares[:, None] == 0) | (squares[None, :] == 0)
    sure = exact | (squared > SURE * sums)
    sure.fill_diagonal_(True)
    return squared.sqrt() * unit, squares.sqrt() * scale, sure


def _refine(distance: Tensor, sure: np.ndarray, stacked: Tree) -> None:
    """Measure close models again, around one of their own: in place, a model at a time until all are sure."""
    for model in range(len(sure)):
        near = np.flatnonzero(~sure[model])
        if not len(near):
            continue
        group = torch.from_numpy(np.concatenate([[model], near])).to(distance.device)
        again, _, now_sure = _around(rows(stacked, group), rows(stacked, model))
        block = (group[:, None], group[None, :])
        known = torch.from_numpy(sure).to(distance.device)[block]
        distance[block] = torch.where(known, distance[block], again)
        here = group.cpu().numpy()
        sure[np.ix_(here, here)] |= now_sure.cpu().numpy()


def _gram(stacked: Tree, reference: Tree | None) -> tuple[Tensor, Tensor]:
    """([m, m] products of the rows (less the reference), each divided by its scale; [m] scales, powers of two)."""
    parts = [
        value.reshape(len(value), -1).to(torch.float64)
        - (0 if reference is None else reference[name].reshape(1, -1).to(torch.float64))
        for name, value in stacked.items()
        if value.numel()
    ]
    largest = torch.stack([part.abs().amax(1) for part in parts]).amax(0)  # [m]
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
    gram = torch.zeros(len(largest), len(largest), dtype=torch.float64, device=largest.device)
    for part in parts:
        scaled = part / scale[:, None]
        gram += scaled @ scaled.T
    return gram, scale
