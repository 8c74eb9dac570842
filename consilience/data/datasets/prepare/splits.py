"""Which rows are held out for testing: seeded, stratified by group and label."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from consilience.core.settings import Invalid, Range

HeldOut = Annotated[float, Range(above=0, below=1)]
"""The share of rows kept for testing."""

STREAM = 0x7E57  # a stream of its own: independent of other draws with the same seed


def held_out(
    labels: np.ndarray, *, fraction: float, seed: int, groups: np.ndarray | None = None, owed: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """(training rows, test rows), ascending; stratified by group and label, shares rounded up or down.

    Rows of a group are sorted by label, shuffled within a label, and test rows taken at even distances. The rounding
    remainder of a group is carried to the next, so that many small groups give the right share together; `owed` is
    the remainder carried to the first.
    """
    rng = np.random.default_rng([seed, STREAM])
    labels = np.asarray(labels)
    groups = np.zeros(len(labels), np.int64) if groups is None else np.asarray(groups)
    is_test = np.zeros(len(labels), bool)
    shuffled = rng.permutation(len(labels))
    ordered = shuffled[np.lexsort((labels[shuffled], groups[shuffled]))]
    _, starts, sizes = np.unique(groups[ordered], return_index=True, return_counts=True)
    for start, size in zip(starts.tolist(), sizes.tolist()):
        share = size * fraction
        owed = min(owed, 1.0) + share
        count = min(int(owed + 0.5), math.ceil(share), size - 1)  # a group never loses its last training row
        owed -= count
        offset = rng.integers(1024) / 1024  # exact integers, so that the last index stays below size
        places = (np.arange(count) + offset) * (size / max(count, 1))
        is_test[ordered[start + places.astype(np.int64)]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def given_or_held_out(
    labels: np.ndarray, *, given: int | None, fraction: float, seed: int, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The first `given` rows train and the others test; None: test rows are drawn."""
    if given is None:
        train, test = held_out(labels, fraction=fraction, seed=seed, groups=groups)
        if not len(train) or not len(test):
            raise Invalid(f"{len(labels)} rows are too few to keep a part of {fraction:g} for tests: give more rows")
        return train, test
    return np.arange(given), np.arange(given, len(labels))


def at_most(labels: np.ndarray, most: int | None, *, seed: int) -> np.ndarray:
    """Ascending row numbers of at most `most` rows, every label in proportion (None: all rows)."""
    if most is None or len(labels) <= most:
        return np.arange(len(labels))
    kept, _ = held_out(labels, fraction=1 - most / len(labels), seed=seed)
    return kept[:most]
