"""Draws from secret keys: uniform, normal, independent between keys and purposes, and never from the run's seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats

from consilience.privacy.round_keys import SIZE, derived, fresh, name_of, normals, seeded, uniforms

KEY, OTHER = bytes(range(SIZE)), bytes(SIZE)


def test_draws_have_their_distributions() -> None:
    assert scipy.stats.kstest(uniforms(KEY, "a", 50_000), "uniform").pvalue > 1e-3
    found = normals(KEY, "a", 50_001)
    assert len(found) == 50_001 and scipy.stats.kstest(found, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(found[:-1:2], found[1::2])[0, 1]) < 0.02, "the two of a pair hang together"


@pytest.mark.parametrize("draw", [uniforms, normals])
def test_fewer_are_the_first_of_more(draw: Callable[[bytes, str, int], np.ndarray]) -> None:
    """So a client's coin does not depend on how many clients there are."""
    many = draw(KEY, "a", 1000)
    for count in (0, 1, 2, 7, 999):
        assert np.array_equal(draw(KEY, "a", count), many[:count])


def test_other_keys_and_purposes_have_nothing_in_common() -> None:
    streams = [uniforms(KEY, "a", 4000), uniforms(KEY, "b", 4000), uniforms(OTHER, "a", 4000)]
    streams += [uniforms(derived(KEY, "a", about), "a", 4000) for about in (b"", b"x")]
    between = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(between).max() < 0.08
    assert len({name_of(KEY), name_of(OTHER), KEY.hex()[:32], derived(KEY, "name").hex()[:32]}) == 3


def test_fresh_keys_are_never_the_same_and_seeded_ones_always() -> None:
    assert len({fresh(1) for _ in range(100)}) == 100 and len(fresh(1)) == SIZE
    assert seeded(3, 1) == seeded(3, 1) and len({seeded(3, 1), seeded(3, 2), seeded(31, 1), seeded(4, 1)}) == 4
