"""Random numbers for channels: functions of a key, alike inside and outside vmap."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from consilience.core import rng


def uniforms(keys: Tensor, count: int) -> Tensor:
    """[..., count] float64 numbers in [0, 1), multiples of 2^-53."""
    return (rng.bits(keys, count) >> 10).to(torch.float64) * 2.0**-53


def normals(keys: Tensor, count: int) -> Tensor:
    """[..., count] float64 standard normal numbers (Box and Muller: two from each pair of uniform ones)."""
    half = -(-count // 2)
    pairs = uniforms(keys, 2 * half)
    radius = (-2 * torch.log1p(-pairs[..., :half])).sqrt()  # 1 - u is in (0, 1]
    angle = 2 * math.pi * pairs[..., half:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)[..., :count]


def exponentials(keys: Tensor) -> Tensor:
    """One float64 exponential number of mean 1 for each key: the power gain of a Rayleigh channel."""
    return -torch.log1p(-uniforms(keys, 1)[..., 0])
