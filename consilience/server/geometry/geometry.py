"""Distances and angles between stacked models: Gram matrices by matrix products, in float64."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import rng, tree
from consilience.core.remote import RemoteTensor, each
from consilience.core.settings import Invalid
from consilience.core.tree import Tree, rows

SURE = 1e-3  # a squared distance below this share of the squared norms it is computed from has lost precision
CANCELLED = 1e-14  # a mean update below the square root of this share of its summands is rounding: no direction


class Geometry(NamedTuple):
    """Distances and cosines of m models to each other and to the model they started from."""

    distance: Tensor  # [m, m] |w_i - w_j|
    movement: Tensor  # [m] |w_i - anchor|
    cosine: Tensor  # [m, m] NaN where a model is all zeros
    anchor_cosine: Tensor  # [m]


def measure(stacked: Tree, anchor: Tree, *, directions: int | None = None, key: int = 0) -> Geometry:
    """Geometry of stacked parameters [m, ...] around `anchor`: O(m^2 P) at the speed of a matrix product.

    With `directions`, the m^2 P part uses a sketch of that many numbers per client, drawn by `key`.
    """
    if directions is None:
        distance, movement = _distances(stacked, anchor)
        gram, _ = _gram(stacked, None, anchor)
        norms = gram.diagonal().sqrt()
        cosine = (gram / (norms[:, None] * norms[None, :])).clamp(-1, 1)
        return Geometry(distance=distance, movement=movement, cosine=cosine[:-1, :-1], anchor_cosine=cosine[:-1, -1])
    origin = tree.map_leaves(torch.zeros_like, anchor)
    norms, length = _lengths(stacked, origin), _lengths(rows(anchor, None), origin)  # [m], [1]
    distance, movement = _sketched_distances(stacked, anchor, directions, key)[0], _lengths(stacked, anchor)
    # only the distances were sketched: cosines, which are near 1, keep their precision
    between, to_anchor = _angle(norms[:, None], norms[None, :], distance), _angle(norms, length, movement)
    return Geometry(distance=distance, movement=movement, cosine=between, anchor_cosine=to_anchor)


def distances(stacked: Tree, reference: Tree) -> Tensor:
    """[m, m] |w_i - w_j| only, at half the cost of `measure`; the models should be near the reference."""
    return _distances(stacked, reference)[0]


def measure_updates(stacked: Tree, anchor: Tree, *, directions: int | None = None, key: int = 0) -> Geometry:
    """The same distances, but angles between the updates w_i - anchor, and between each and their mean.

    An update of length zero has no direction: its cosines are 0, and so are all to a mean that cancels out.
    """
    if directions is None:
        distance, movement = _distances(stacked, anchor)
        gram, scale = _gram(stacked, anchor)
    else:
        distance, sketched = _sketched_distances(stacked, anchor, directions, key)
        movement = _lengths(stacked, anchor)
        gram, scale = _gram(sketched, None)
    squares = gram.diagonal()
    norms = squares.sqrt()
    cosine = torch.nan_to_num(gram / (norms[:, None] * norms[None, :]), nan=0.0, posinf=0.0, neginf=0.0).clamp(-1, 1)
    share = scale / scale.amax()  # of the largest, so that the mean cannot overflow
    mean_square = share @ gram @ share
    length = torch.where(mean_square > CANCELLED * (share.square() * squares).sum(), mean_square, 0.0).sqrt()
    to_mean = torch.nan_to_num((gram @ share) / (norms * length), nan=0.0, posinf=0.0, neginf=0.0).clamp(-1, 1)
    return Geometry(distance=distance, movement=movement, cosine=cosine, anchor_cosine=to_mean)


def cosines(geometry: Geometry, ids: list[int]) -> tuple[Tensor, Tensor]:
    """([m, m] between models, [m] to the anchor); a model of zero length is refused, since it has no direction."""
    if not bool(geometry.anchor_cosine.isfinite().all()):
        zeros = [ids[k] for k in torch.nonzero(geometry.cosine.diagonal().isnan()).flatten().tolist()]
        nowhere = bool(geometry.anchor_cosine.isnan().all())
        who = "the global model" if nowhere else f"the model of clients {zeros}"
        raise Invalid(
            f"{who} is all zeros, so its cosine similarity is undefined: start from a random initial model, or compare "
            "updates with compare_on = 'updates' (low-rank adapters start at B = 0)"
        )
    return geometry.cosine, geometry.anchor_cosine


def _distances(stacked: Tree, reference: Tree) -> tuple[Tensor, Tensor]:
    """([m, m] between the rows, [m] to the reference), at full precision."""
    distance, movement, sure = _around(stacked, reference)
    if not bool(sure.all()):
        _refine(distance, sure.cpu().numpy(), stacked)
    return distance, movement


def _sketched_distances(stacked: Tree, anchor: Tree, directions: int, key: int) -> tuple[Tensor, Tree]:
    """([m, m] between the rows up to the sketch's error, the sketch itself)."""
    sketched = {"sketch": sketch(stacked, anchor, directions, key)}
    return _distances(sketched, tree.map_leaves(torch.zeros_like, rows(sketched, 0)))[0], sketched


def _lengths(stacked: Tree, reference: Tree) -> Tensor:
    """[m] |w_i - reference|: O(m P), some models at a time."""
    count, lengths = len(next(iter(stacked.values()))), []
    for start in range(0, count, BLOCK):
        some = tree.take(stacked, np.arange(start, min(start + BLOCK, count)))
        columns = _columns(some, reference, None)
        scale = _power_above(torch.stack(each(_largest, *columns)).amax(0))
        squares = each(_squares, *columns, given=(scale,))
        lengths.append(torch.stack(squares).sum(0).sqrt() * scale)
    return torch.cat(lengths)


def _angle(one: Tensor, other: Tensor, apart: Tensor) -> Tensor:
    """The cosine between vectors of these lengths and this distance; NaN if one is zero."""
    return (0.5 * (one / other + other / one - (apart / one) * (apart / other))).clamp(-1, 1)


def _around(stacked: Tree, reference: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """([m, m] distances, [m] distances to the reference, [m, m] whether a distance kept its precision).

    |a - b|^2 = |a|^2 + |b|^2 - 2 <a, b> is computed relative to the reference, which is near the models, because it
    loses precision when a and b are much closer to each other than to the origin.
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
    """Measure close models again relative to one of them, in place, until all distances are precise."""
    for model in range(len(sure)):
        near = np.flatnonzero(~sure[model])
        if not len(near):
            continue
        here = np.concatenate([[model], near])
        group = torch.from_numpy(here).to(distance.device)
        again, _, now_sure = _around(tree.take(stacked, here), rows(stacked, model))
        block = (group[:, None], group[None, :])
        known = torch.from_numpy(sure).to(distance.device)[block]
        distance[block] = torch.where(known, distance[block], again)
        sure[np.ix_(here, here)] |= now_sure.cpu().numpy()


def _gram(stacked: Tree, reference: Tree | None, last: Tree | None = None) -> tuple[Tensor, Tensor]:
    """([m, m] products of the rows (minus the reference), each divided by its scale; [m] scales, powers of two).

    `last` is one more row. Remote models are not fetched: only one [m, m] block per tensor is.
    """
    columns = _columns(stacked, reference, last)
    if all(_is_narrow(value) for column in columns for value in column):
        count = len(columns[0][0]) + (last is not None)
        scale = torch.ones(count, dtype=torch.float64, device=columns[0][0].device)
        products = each(_products, *columns, given=(None,))
    elif any(isinstance(value, RemoteTensor) for value in columns[0]):
        scale = _power_above(torch.stack(each(_largest, *columns)).amax(0))
        products = each(_products, *columns, given=(scale,))
    else:  # the differences are computed once
        parts = [_difference(*call) for call in zip(*columns)]
        scale = _power_above(torch.stack([part.abs().amax(1) for part in parts]).amax(0))
        products = [_scaled_products(part, scale) for part in parts]
    return functools.reduce(torch.add, products), scale


def _is_narrow(value: Tensor | None) -> bool:
    """Whether squares can neither overflow nor vanish in float64, so that a scale of 1 gives the same bits."""
    return value is None or (value.is_floating_point() and value.element_size() < 8)


def _columns(stacked: Tree, reference: Tree | None, last: Tree | None) -> tuple[list[Tensor], list[Any], list[Any]]:
    """Non-empty tensors with their references and last rows, by name."""
    names = [name for name, value in stacked.items() if value.numel()]
    nothing: list[Any] = [None] * len(names)
    return (
        [stacked[name] for name in names],
        nothing if reference is None else [reference[name] for name in names],
        nothing if last is None else [last[name] for name in names],
    )


def _difference(value: Tensor, reference: Tensor | None, last: Tensor | None) -> Tensor:
    """One tensor (and a last row) as rows [m, P] in float64, minus the reference."""
    if last is not None:
        value = torch.cat([value, last.unsqueeze(0)])
    flat = value.reshape(len(value), -1)
    return flat.to(torch.float64) if reference is None else flat - reference.reshape(1, -1).to(torch.float64)


def _largest(value: Tensor, reference: Tensor | None, last: Tensor | None) -> Tensor:
    """[m] the largest entry of each row."""
    return _difference(value, reference, last).abs().amax(1)


def _squares(value: Tensor, reference: Tensor | None, last: Tensor | None, scale: Tensor) -> Tensor:
    """[m] squared length of each row, divided by its scale."""
    return (_difference(value, reference, last) / scale[:, None]).square().sum(1)


def _products(value: Tensor, reference: Tensor | None, last: Tensor | None, scale: Tensor | None) -> Tensor:
    """[m, m] products of the rows, divided by their scales."""
    part = _difference(value, reference, last)
    return part @ part.T if scale is None else _scaled_products(part, scale)


def _scaled_products(part: Tensor, scale: Tensor) -> Tensor:
    scaled = part / scale[:, None]
    return scaled @ scaled.T


def _power_above(largest: Tensor) -> Tensor:
    """[m] powers of two above each row's entries: dividing by them is exact, and squares cannot overflow then."""
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)


BLOCK = 64  # clients at a time: float64 copies of thousands of models would not fit


def sketch(stacked: Tree, anchor: Tree, directions: int, key: int) -> Tensor:
    """[m, directions] sums of the updates w_i - anchor: each parameter goes, with a random sign, into one random sum.

    A Johnson-Lindenstrauss projection with one non-zero per column (the count sketch of Charikar et al. 2002), so it
    costs O(m P) whatever its length k. For vectors x, y, over the draw of signs and places, <Sx, Sy> has mean <x, y>
    and variance at most (|x|^2 |y|^2 + <x, y>^2) / k. So |Sx|^2 / |x|^2 has mean 1 and deviation at most sqrt(2 / k),
    and by Chebyshev lies outside 1 +- e with probability at most 2 / (k e^2): at k = 4096 a distance between two
    clients is off by 1.1 % (one deviation). The draw is a function of `key` alone; equal models stay equal.
    """
    first = next(iter(stacked.values()))
    sums = torch.zeros(len(first), directions, dtype=torch.float64, device=first.device)
    names = [(place, name) for place, name in enumerate(stacked) if stacked[name].numel()]
    columns = [stacked[name] for _, name in names], [anchor[name] for _, name in names], [place for place, _ in names]
    for part in each(sketch_tensor, *columns, given=(directions, key)):
        sums += part
    return sums


def sketch_tensor(value: Tensor, anchor: Tensor, place: int, directions: int, key: int) -> Tensor:
    """[m, directions] what one tensor, the `place`-th, adds to the sums."""
    count = value[0].numel()
    hashes = rng.bits(torch.tensor(rng.key(key, "sketch", place), device=value.device), count)
    # a shuffle dealt out in turn, from a random sum on: a fixed order of addition, and no two parameters share a
    # sum with a probability above 1 / k (independent places would be added by atomics, in any order, on a GPU)
    order, turn = hashes.argsort(stable=True), rng.key(key, "sketch turn", place) % directions
    signs = (1.0 - 2.0 * (hashes & 1))[order]
    sums = []
    for start in range(0, len(value), BLOCK):
        some = value[start : start + BLOCK].reshape(-1, count)[:, order].to(torch.float64)
        update = (some - anchor.reshape(-1)[order].to(torch.float64)) * signs
        dealt = torch.nn.functional.pad(update, (0, -count % directions)).reshape(len(some), -1, directions)
        sums.append(dealt.sum(1).roll(turn, 1))
    return torch.cat(sums)
