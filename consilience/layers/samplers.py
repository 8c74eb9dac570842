"""Random tensors from a key, where the value at an index depends on the key and on that index alone.

A tensor of a shorter batch therefore holds the same values as the first rows of a longer one, whichever dimension the
batch is: padding does not change what a row draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from consilience.core import rng

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_TINY = 2.0**-54


def at_positions(key: Tensor, shape: Sequence[int]) -> Tensor:
    """One key for every index."""
    for length in shape:
        key = rng.split(key, length)
    return key


def keep(key: Tensor, shape: Sequence[int], drop: float) -> Tensor:
    """Flags that are False with probability `drop` (to 1 in 65,536)."""
    *outer, last = shape or (1,)
    return rng.keep_mask(at_positions(key, outer), last, drop).reshape(tuple(shape))


def unit(key: Tensor, shape: Sequence[int]) -> Tensor:
    """float64 numbers in [0, 1), multiples of 2^-53."""
    *outer, last = shape or (1,)
    return rng.uniforms(at_positions(key, outer), last).reshape(tuple(shape))


def uniform(key: Tensor, shape: Sequence[int], dtype: torch.dtype, low: Any = 0.0, high: Any = 1.0) -> Tensor:
    """Numbers in [low, high)."""
    steps = 2.0 ** _DIGITS.get(dtype, 24)
    fine = unit(key, shape)
    drawn = (fine if dtype == torch.float64 else (fine * steps).floor() / steps).to(dtype)
    return drawn if (low, high) == (0.0, 1.0) else drawn * (high - low) + low


def normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    """Gaussian numbers (Box and Muller: neighbours in the last dimension come from one pair of uniform numbers)."""
    *outer, last = shape or (1,)
    pairs = unit(key, (*outer, -(-last // 2), 2))
    radius, angle = (-2 * torch.log1p(-pairs[..., 0])).sqrt(), 2 * math.pi * pairs[..., 1]
    both = torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(-2)
    drawn = both[..., :last].reshape(tuple(shape)).to(dtype)
    return drawn if (mean, std) == (0.0, 1.0) else drawn * std + mean


def exponential(key: Tensor, shape: Sequence[int], dtype: torch.dtype, rate: float = 1.0) -> Tensor:
    """Numbers of mean 1 / rate, never 0."""
    drawn = (-torch.log1p(-(unit(key, shape) + _TINY)) / rate).to(dtype)
    return drawn.clamp(min=torch.finfo(dtype).tiny)


def whole(key: Tensor, shape: Sequence[int], dtype: torch.dtype, low: int, high: int) -> Tensor:
    """Integers low ... high - 1."""
    *outer, last = shape or (1,)
    drawn = rng.bits(at_positions(key, outer), last).reshape(tuple(shape))
    return (drawn % (high - low) + low).to(dtype)


def categories(key: Tensor, weights: Tensor, count: int, replacement: bool) -> Tensor:
    """[..., count] places in the last dimension of the weights, drawn in proportion to them."""
    weights = weights.to(torch.float64)
    if not replacement:  # the first arrivals of a race, each at its own rate
        race = exponential(key, weights.shape, torch.float64)
        return (weights / race).topk(count, -1).indices
    steps = weights.cumsum(-1)
    steps = steps / steps[..., -1:]
    drawn = unit(key, (*weights.shape[:-1], count))
    return (steps.unsqueeze(-2) <= drawn.unsqueeze(-1)).sum(-1)
