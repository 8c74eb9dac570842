"""Randomness without state: every draw is a function of (run seed, purpose, round, client, ...).

PyTorch's generators are sequential: the number drawn depends on what was drawn before and on which device. A federation
needs the same number for the same client wherever and whenever it runs, inside vmap and inside a CUDA graph, so device
draws hash a counter instead (SplitMix64, Steele et al. 2014, in int64 tensor arithmetic; equal bits on CPU and GPU).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core.settings import Invalid

_WEYL = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_WRAP = 2**64


def host(seed: int, *purpose: int | str) -> np.random.Generator:
    """A fresh NumPy generator for one purpose, such as `host(seed, "selection", round)`."""
    return np.random.default_rng(_entropy(seed, purpose))


def subseed(seed: int, *purpose: int | str) -> int:
    """A derived seed, whose draws do not repeat those of `seed`."""
    return int(np.random.SeedSequence(_entropy(seed, purpose)).generate_state(1, np.uint64)[0])


def key(seed: int, *purpose: int | str) -> int:
    """A 64-bit key (as a signed int) for device draws."""
    value = seed
    for part in purpose:
        value = (value + _code(part) * (_WEYL % _WRAP)) % _WRAP
        value = ((value ^ (value >> 30)) * (_MIX_1 % _WRAP)) % _WRAP
        value = ((value ^ (value >> 27)) * (_MIX_2 % _WRAP)) % _WRAP
        value ^= value >> 31
    return _signed(value)


def fold(keys: Any, counters: Any) -> Any:
    """New keys from keys and counters, which broadcast; at least one is a tensor or an int64 array."""
    offset = (counters + 1) * _WEYL
    return _mix(keys + (_signed(offset) if isinstance(offset, int) else offset))


def folds(keys: Tensor, counters: Sequence[int]) -> Tensor:
    """[..., n] what `fold` gives for each counter, by one hash of them all."""
    return _mix(torch.stack([keys + _signed((counter + 1) * _WEYL) for counter in counters], -1))


def bits(keys: Tensor, count: int) -> Tensor:
    """[..., count] uniform 63-bit integers for each key."""
    return split(keys, count) & (2**63 - 1)


def split(keys: Tensor, count: int) -> Tensor:
    """[..., count] new keys from each key, those of `fold` for 0, 1, ...: the first do not depend on `count`."""
    # 1, 2, ... times the constant, as a cumulative sum over a tensor: a compiler that sees a product of an index and a
    # constant computes it in 32 bits
    increments = ((keys & 0) + _WEYL).unsqueeze(-1).expand(*keys.shape, count)
    return _mix(keys.unsqueeze(-1) + increments.cumsum(-1))


def permutations(keys: Tensor, sizes: Tensor, longest: int) -> Tensor:
    """[..., longest] row orders: the first `sizes` entries permute 0..size-1 uniformly, the rest is padding."""
    order = bits(keys, longest)
    beyond = torch.arange(longest, device=keys.device) >= sizes.unsqueeze(-1)
    return torch.where(beyond, 2**63 - 1, order).argsort(dim=-1, stable=True)


def keep_mask(keys: Tensor, count: int, drop: float) -> Tensor:
    """[..., count] flags that are False with probability `drop` (to 1 in 65,536): four flags from each 64-bit hash."""
    hashes = split(keys, -(-count // 4)).unsqueeze(-1)
    lanes = (hashes >> (16 * torch.arange(4, device=keys.device))) & 0xFFFF
    return lanes.flatten(-2)[..., :count] >= round(drop * 2**16)


def uniforms(keys: Tensor, count: int) -> Tensor:
    """[..., count] float64 numbers in [0, 1), multiples of 2^-53."""
    return fractions(split(keys, count))


def fractions(keys: Tensor) -> Tensor:
    """What `uniforms` makes of keys that are split already."""
    return ((keys & (2**63 - 1)) >> 10).to(torch.float64) * 2.0**-53


def normals(keys: Tensor, count: int) -> Tensor:
    """[..., count] float64 standard normal numbers (Box and Muller: two from each pair of uniform ones)."""
    half = -(-count // 2)
    pairs = uniforms(keys, 2 * half)
    radius = (-2 * torch.log1p(-pairs[..., :half])).sqrt()  # 1 - u is in (0, 1]
    angle = 2 * math.pi * pairs[..., half:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)[..., :count]


def exponentials(keys: Tensor) -> Tensor:
    """One float64 exponential number of mean 1 for each key."""
    return -torch.log1p(-uniforms(keys, 1)[..., 0])


def _entropy(seed: int, purpose: tuple[int | str, ...]) -> list[int]:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise Invalid(f"seed = {seed!r} must be a whole number >= 0")
    return [int(seed), *(_code(part) for part in purpose)]


def _code(part: int | str) -> int:
    return zlib.crc32(part.encode()) if isinstance(part, str) else int(part)


def _signed(value: int) -> int:
    return (value + _WRAP // 2) % _WRAP - _WRAP // 2


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return value ^ _shift(value, 31)


def _shift(value: Tensor, places: int) -> Tensor:
    # int64 >> copies the sign bit: mask it away for a logical shift
    return (value >> places) & ((1 << (64 - places)) - 1)
