"""The discrete Gaussian: integer noise that clients add to the integers of a secure sum.

N_Z(0, s^2) has P(x) proportional to exp(-x^2 / (2 s^2)) on the integers (Canonne, Kamath and Steinke 2020, *The
discrete Gaussian for differential privacy*). Kairouz, Liu and Steinke 2021, *The distributed discrete Gaussian
mechanism for federated learning with secure aggregation*: if n clients each add N_Z(0, s^2) to every value, and one
client moves the vector of whole numbers by at most D, the sum is e^2 / 2 - concentrated differentially private with
e^2 = D^2 / (n s^2) + tau d / 2, where tau = 10 sum_{k < n} exp(-2 pi^2 s^2 k / (k + 1)) (theorem 1).
"""

from __future__ import annotations

import math

import numpy as np

from consilience.privacy.round_keys import stream, uniforms

LEAST_DEVIATION = 4.0
"""Of one client's noise, in whole numbers: then tau is below 10 n exp(-157), and nothing beside D^2 / (n s^2)."""
MOST_DEVIATION = 2.0**40  # sums of squares are still far below 2^53
_BATCH = 1 << 20  # candidates at once


def sample(key: bytes, purpose: str, count: int, deviation: float) -> np.ndarray:
    """[count] int64 from N_Z(0, deviation^2): rejection from a discrete Laplace distribution (their algorithm 3).

    Bernoulli draws compare 53 random bits with a probability in float64, an error of at most 2^-52 each.
    """
    if not 0 < deviation <= MOST_DEVIATION:
        raise ValueError(f"a deviation of {deviation:g} is not within 0 .. {MOST_DEVIATION:g}")
    found, have, turn = [np.empty(0, dtype=np.int64)], 0, 0
    while have < count:
        candidates = min(_BATCH, 2 * (count - have) + 64)
        kept = _accepted(key, f"{purpose} {turn}", candidates, deviation)
        found.append(kept)
        have, turn = have + len(kept), turn + 1
    return np.concatenate(found)[:count]


def _accepted(key: bytes, purpose: str, count: int, deviation: float) -> np.ndarray:
    scale = math.floor(deviation) + 1
    whole = np.frombuffer(stream(key, f"{purpose} whole", 8 * count), dtype="<u8")
    fair = whole <= np.uint64((1 << 64) // scale * scale - 1)  # so that every remainder is equally likely
    low = (whole % np.uint64(scale)).astype(np.int64)
    coins = uniforms(key, f"{purpose} coins", 4 * count).reshape(4, count)
    # |x| = low + scale v: low with probability exp(-low / scale), and v successes of probability 1 / e in a row
    high = np.floor(-np.log1p(-coins[0])).astype(np.int64)
    size = low + scale * high
    negative = coins[1] < 0.5
    laplace = fair & (coins[2] < np.exp(-low / scale)) & ~(negative & (size == 0))
    gaussian = coins[3] < np.exp(-((size - deviation**2 / scale) ** 2) / (2 * deviation**2))
    return np.where(negative, -size, size)[laplace & gaussian]
