"""Stateless randomness: known answers, uniformity, agreement of host and device arithmetic."""

from __future__ import annotations

import math
import zlib
from collections import Counter

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.core import rng

MASK = 2**64 - 1
INT64 = st.integers(-(2**63), 2**63 - 1)


def splitmix64(seed: int, count: int) -> list[int]:
    """The published generator, in plain integers: an independent second implementation."""
    out, state = [], seed & MASK
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        out.append(z ^ (z >> 31))
    return out


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def unsigned(value: int) -> int:
    return value & MASK


def test_published_splitmix64_values() -> None:
    """The reference sequence of seed 1234567, as printed with many implementations of SplitMix64."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert splitmix64(1234567, 5) == published
    assert rng.bits(torch.tensor(1234567), 5).tolist() == [value & (2**63 - 1) for value in published]


@given(INT64, st.integers(1, 40))
def test_bits_are_splitmix64_without_the_top_bit(key: int, count: int) -> None:
    got = rng.bits(torch.tensor(key), count)
    assert got.dtype == torch.int64 and bool((got >= 0).all())
    assert got.tolist() == [value & (2**63 - 1) for value in splitmix64(key, count)]


@given(st.lists(INT64, min_size=1, max_size=4))
def test_bits_of_many_keys_are_those_of_each(keys: list[int]) -> None:
    together = rng.bits(torch.tensor(keys), 7)
    assert together.shape == (len(keys), 7)
    for row, key in zip(together, keys):
        assert torch.equal(row, rng.bits(torch.tensor(key), 7))


@given(INT64, st.integers(0, 2**40))
def test_fold_is_the_counter_th_output(key: int, counter: int) -> None:
    state = (unsigned(key) + counter * 0x9E3779B97F4A7C15) & MASK
    expected = signed(splitmix64(state, 1)[0])
    forms = [
        rng.fold(torch.tensor(key), torch.tensor(counter)),
        rng.fold(torch.tensor(key), counter),
        rng.fold(key, torch.tensor(counter)),
    ]
    assert [int(form) for form in forms] == [expected] * 3


def test_several_folds_at_once_are_those_one_by_one() -> None:
    keys, counters = torch.tensor([[-3, 4], [2**62, 0]]), (0, 5, 2**33, 2**33 + 1, 2**63 - 2)
    assert torch.equal(rng.folds(keys, counters), torch.stack([rng.fold(keys, one) for one in counters], -1))


def test_splits_are_folds_in_turn_and_fractions_of_them_are_uniform_draws() -> None:
    keys = torch.tensor([7, -(2**61)])
    split = rng.split(keys, 5)
    assert torch.equal(split, rng.fold(keys.unsqueeze(1), torch.arange(5)))
    assert torch.equal(rng.fractions(split), rng.uniforms(keys, 5))


def test_fold_broadcasts() -> None:
    folded = rng.fold(torch.tensor([[3], [4]]), torch.arange(5))
    assert folded.shape == (2, 5)
    assert int(folded[1, 2]) == int(rng.fold(torch.tensor(4), 2))
    assert len(set(folded.flatten().tolist())) == 10


def test_key_chains_the_purpose() -> None:
    def mixed(value: int) -> int:
        return splitmix64(value - 0x9E3779B97F4A7C15, 1)[0]

    expected = 42
    for part in (zlib.crc32(b"plan"), 7):
        expected = mixed(expected + part * 0x9E3779B97F4A7C15)
    assert rng.key(42, "plan", 7) == signed(expected)


def test_keys_of_different_purposes_differ() -> None:
    keys = [rng.key(seed, purpose, n) for seed in range(20) for purpose in ("plan", "channel") for n in range(20)]
    assert len(set(keys)) == len(keys)
    assert rng.key(1, "plan") != rng.key(1, "plan", 0)
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_golden_values() -> None:
    """Whatever changes these changes every run ever recorded."""
    assert rng.key(0, "plan", 0) == -3384947958821715028
    assert rng.key(2024, "channel", 17) == -5132335939315954390
    assert rng.permutations(torch.tensor(99), torch.tensor(8), 8).tolist() == [1, 3, 4, 6, 7, 5, 0, 2]
    assert rng.keep_mask(torch.tensor(5), 12, 0.5).int().tolist() == [1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 1, 0]
    assert rng.host(3, "selection", 4).integers(0, 1000, 4).tolist() == [809, 234, 303, 470]


def test_draws_depend_on_every_part_of_the_purpose() -> None:
    streams = [
        rng.host(0, "a", 0),
        rng.host(1, "a", 0),
        rng.host(0, "b", 0),
        rng.host(0, "a", 1),
    ]
    assert len({stream.integers(0, 2**62) for stream in streams}) == len(streams)
    again = rng.host(0, "a", 0)  # a stream of its own: what another one drew does not move it
    assert again.integers(0, 2**62, 3).tolist() == rng.host(0, "a", 0).integers(0, 2**62, 3).tolist()


@given(INT64, st.integers(0, 30), st.integers(0, 12))
def test_permutations_permute_and_pad(key: int, size: int, extra: int) -> None:
    longest = max(1, size + extra)
    order = rng.permutations(torch.tensor([key]), torch.tensor([size]), longest)[0].tolist()
    assert len(order) == longest
    assert sorted(order[:size]) == list(range(size))
    assert order[size:] == list(range(size, longest))  # padding stays in its place


@given(INT64, st.integers(1, 20), st.integers(0, 20))
def test_a_permutation_does_not_depend_on_the_padding(key: int, size: int, extra: int) -> None:
    alone = rng.permutations(torch.tensor(key), torch.tensor(size), size)
    padded = rng.permutations(torch.tensor(key), torch.tensor(size), size + extra)
    assert torch.equal(alone, padded[:size])


def chi_square_limit(freedom: int) -> float:
    """About the 99.99 % point (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def test_permutations_are_uniform() -> None:
    draws = 24_000
    keys = rng.fold(rng.key(0, "test"), torch.arange(draws))
    orders = rng.permutations(keys, torch.full((draws,), 4), 6)[:, :4]
    counts = Counter(map(tuple, orders.tolist()))
    assert len(counts) == 24
    statistic = sum((count - draws / 24) ** 2 / (draws / 24) for count in counts.values())
    assert statistic < chi_square_limit(23)


def test_bits_are_uniform_in_every_position() -> None:
    draws = rng.bits(torch.tensor(rng.key(1, "test")), 20_000).numpy()
    ones = np.array([((draws >> place) & 1).mean() for place in range(63)])
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / math.sqrt(20_000)


@pytest.mark.parametrize("drop", [0.0, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_keep_mask_rate_is_within_binomial_bounds(drop: float) -> None:
    count = 200_000
    dropped = int((~rng.keep_mask(torch.tensor(rng.key(7, "drop")), count, drop)).sum())
    spread = math.sqrt(count * drop * (1 - drop))
    assert abs(dropped - count * drop) <= 5 * spread


def test_keep_mask_of_neighbouring_keys_is_independent() -> None:
    keys = rng.fold(rng.key(0, "mask"), torch.arange(2))
    a, b = rng.keep_mask(keys, 100_000, 0.5)
    agree = float((a == b).double().mean())
    assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(100_000)


def test_draws_work_inside_vmap() -> None:
    keys = torch.arange(5)
    mapped = torch.func.vmap(lambda key: rng.keep_mask(rng.fold(key, 3), 9, 0.4))(keys)
    assert torch.equal(mapped, torch.stack([rng.keep_mask(rng.fold(key, 3), 9, 0.4) for key in keys]))


@pytest.mark.parametrize("count", [2, 7])
def test_normals_are_normal_at_every_place(count: int) -> None:
    """Both numbers of a Box-Muller pair, by 20,000 keys; the critical value is that of p = 1e-6."""
    drawn = rng.normals(rng.fold(torch.tensor(2), torch.arange(20_000)), count).numpy()
    for place in range(count):
        assert scipy.stats.kstest(drawn[:, place], "norm").statistic < 2.7 / 20_000**0.5
    assert np.abs(np.corrcoef(drawn.T) - np.eye(count)).max() < 5 / 20_000**0.5


def test_exponentials_have_mean_one() -> None:
    drawn = rng.exponentials(rng.fold(torch.tensor(2), torch.arange(20_000))).numpy()
    assert scipy.stats.kstest(drawn, "expon").statistic < 2.7 / 20_000**0.5
