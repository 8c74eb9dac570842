"""Secret keys of rounds: secret draws come from the operating system, not from the run's seed.

A key is 32 bytes of the system's generator. A key for one purpose is its HMAC-SHA-256, and draws are the output of
SHAKE-256 on that: without the key these look random, so that no draw, earlier or later,
helps to guess another, and 2^256 keys cannot be searched.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets

import numpy as np

SIZE = 32  # bytes


def fresh(round: int) -> bytes:
    """A key that was never used before, from the operating system's generator."""
    return secrets.token_bytes(SIZE)


def seeded(seed: int, round: int) -> bytes:
    """A reproducible key from a seed: draws from it are not secret."""
    return hashlib.sha256(f"noise seed {seed}, round {round}".encode()).digest()


def derived(key: bytes, purpose: str, about: bytes = b"") -> bytes:
    """A derived key for one purpose and one message, which reveals nothing about this key."""
    return hmac.digest(key, purpose.encode() + b"\0" + about, "sha256")


def name_of(key: bytes) -> str:
    """A public name for a key, from which the key cannot be found."""
    return derived(key, "name").hex()[:32]


def release_of(key: bytes) -> str:
    """A public name for what clients add noise to in a round of this key."""
    return name_of(derived(key, "release"))


def stream(key: bytes, purpose: str, count: int) -> bytes:
    """`count` bytes for one purpose; a shorter stream is a prefix of a longer one."""
    return hashlib.shake_256(derived(key, purpose)).digest(count)


def uniforms(key: bytes, purpose: str, count: int) -> np.ndarray:
    """[count] float64 numbers in [0, 1), multiples of 2^-53; a shorter stream is a prefix of a longer one."""
    bits = np.frombuffer(stream(key, purpose, 8 * count), dtype="<u8")
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normals(key: bytes, purpose: str, count: int) -> np.ndarray:
    """[count] float64 standard normal numbers (Box and Muller); none is beyond 8.6, where 1 in 10^17 would be."""
    pairs = uniforms(key, purpose, 2 * -(-count // 2)).reshape(-1, 2)
    radius = np.sqrt(-2 * np.log1p(-pairs[:, 0]))  # 1 - u is in (0, 1]
    angle = 2 * math.pi * pairs[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)[:count]
