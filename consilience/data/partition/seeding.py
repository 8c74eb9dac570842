"""Random numbers for one purpose: a function of the seed and of what they are for, never of global state."""

from __future__ import annotations

import zlib

import numpy as np

from consilience.core.settings import Invalid


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """An independent stream for (seed, purpose, numbers)."""
    return np.random.default_rng(_entropy(seed, purpose, *numbers))


def subseed(seed: int, purpose: str, *numbers: int) -> int:
    """A seed to hand to an inner partition, so that it does not repeat its owner's draws."""
    state = np.random.SeedSequence(_entropy(seed, purpose, *numbers)).generate_state(1, np.uint64)
    return int(state[0])


def _entropy(seed: int, purpose: str, *numbers: int) -> list[int]:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise Invalid(f"seed = {seed!r} must be a whole number >= 0")
    return [int(seed), zlib.crc32(purpose.encode()), *numbers]
