"""The kernel of the coordinate-wise rules by Triton's interpreter; `test_kernels.py` runs this file.

On a GPU, tests/engines/test_cuda_lanes.py runs it compiled.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from consilience.layers import order_statistics_kernels as kernels
from consilience.server.averaging.combining import coordinate_wise, krum, whole_models

SIZE = 150  # coordinates: more than those of one program
COUNTS = (1, 2, 3, 5, 8, 9, 17, 40, 128)
FULL = 20  # rows up to which every kind of number is tried, as the interpreter is slow


def fractions(count: int) -> Tensor:
    """Values whose sums are exact in float64, in whichever order."""
    return (torch.randn(count, SIZE, generator=torch.Generator().manual_seed(count)) * 2**16).round() / 2**16


def few_values(count: int) -> Tensor:
    """Many equal values, values as far above the median as others below, and zeros of both signs."""
    drawn = torch.randint(-2, 3, (count, SIZE), generator=torch.Generator().manual_seed(count)).float()
    return torch.where((torch.arange(count) % 2 == 0)[:, None], drawn, -drawn)


def plain_mean(values: list[float]) -> np.float32:
    return np.float32(sum(values) / len(values))


def plain_trimmed(stacked: Tensor, keep: int) -> Tensor:
    cut = (len(stacked) - keep) // 2
    columns = [sorted(column)[cut : cut + keep] for column in stacked.T.tolist()]
    return torch.tensor([plain_mean(column) for column in columns])


def plain_around(stacked: Tensor, keep: int) -> Tensor:
    """Sorted by distance; of two as near, the smaller comes first."""
    columns = []
    for column in stacked.T.tolist():
        middle = np.median(column)
        columns.append(sorted(sorted(column), key=lambda value: abs(value - middle))[:keep])
    return torch.tensor([plain_mean(column) for column in columns])


def same(got: Tensor, wanted: Tensor) -> bool:
    return got.dtype == wanted.dtype and torch.equal(got, wanted)


@pytest.mark.parametrize("make", [fractions, few_values])
@pytest.mark.parametrize("count", COUNTS)
def test_trimmed_means_and_medians_are_those_of_a_sort(count: int, make: type) -> None:
    stacked = make(count)
    assert same(kernels.trimmed_mean(stacked, 2 - count % 2), coordinate_wise.median(stacked))
    for cut in {0, count // 5, (count - 1) // 2} if count < FULL else {count // 10}:
        got = kernels.trimmed_mean(stacked, count - 2 * cut)
        assert same(got, plain_trimmed(stacked, count - 2 * cut))
        assert same(got, coordinate_wise.trimmed_mean(stacked, cut))


@pytest.mark.parametrize("make", [fractions, few_values])
@pytest.mark.parametrize("count", COUNTS)
def test_means_around_the_median_are_those_of_a_sort(count: int, make: type) -> None:
    stacked, everyone = make(count), torch.arange(count)
    some = {1, 2, count // 2, count - 2 * (count // 5), count - 1, count} if count < FULL else {count // 4 * 3}
    for keep in some & set(range(1, count + 1)):
        got = kernels.around_median(stacked, everyone, keep)
        assert same(got, plain_around(stacked, keep)), keep
        assert same(got, krum.around_median(stacked, everyone, keep)), keep


def test_only_the_chosen_rows_count_wherever_they_lie() -> None:
    wide = fractions(24)
    chosen = torch.tensor([17, 3, 4, 23, 9, 0, 11])
    for stacked in (wide, wide[:, ::2], wide.T[:24], wide[:, 7:].reshape(24, 11, 13), wide.expand(24, SIZE)[:, :1]):
        wanted = plain_around(stacked[chosen].flatten(1), 4).reshape(stacked.shape[1:])
        assert same(kernels.around_median(stacked, chosen, 4), wanted)
        wanted = plain_trimmed(stacked.flatten(1), 6).reshape(stacked.shape[1:])
        assert same(kernels.trimmed_mean(stacked, 6), wanted)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 1, 0x80000001])
def test_not_a_number_comes_last_and_the_least_numbers_are_told_from_zero(bits: int) -> None:
    """NaN of both signs, both infinities, and the numbers next to zero."""
    stacked = fractions(9)
    stacked[4] = torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))
    stacked[6, ::2] = 0.0
    got, wanted = kernels.trimmed_mean(stacked, 5), coordinate_wise.trimmed_mean(stacked, 2)
    assert wanted.isfinite().all() and same(got, wanted)
    got, wanted = kernels.trimmed_mean(stacked, 9), coordinate_wise.trimmed_mean(stacked, 0)
    assert same(got.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


def test_means_do_not_depend_on_the_order_of_rows() -> None:
    """Sums of numbers of very different sizes, which are rounded."""
    draws = torch.Generator().manual_seed(0)
    stacked = torch.randn(20, SIZE, generator=draws) * 10.0 ** torch.randint(-20, 20, (20, SIZE), generator=draws)
    order = torch.randperm(20, generator=draws)
    assert same(kernels.trimmed_mean(stacked[order], 16), kernels.trimmed_mean(stacked, 16))
    assert same(kernels.around_median(stacked, order, 8), kernels.around_median(stacked, torch.arange(20), 8))


def test_whole_rules_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = fractions(11).reshape(11, 15, 10)
    models = {"params": {"a": stacked, "b": stacked[:, 0]}, "buffers": {"n": torch.arange(11), "mean": stacked[:, 1]}}
    weights = torch.full((11,), 1 / 11, dtype=torch.float64)
    rules = (coordinate_wise.Median(), coordinate_wise.TrimmedMean(f=3), krum.Bulyan(f=2))
    wanted = [rule.merge(models, weights) for rule in rules]
    calls = []

    def asked(given: Tensor, count: int) -> bool:
        calls.append(count)
        return given.is_floating_point()

    for module in (coordinate_wise, krum):
        monkeypatch.setattr(module, "sorts_in_registers", asked)
        monkeypatch.setattr(module, "ordered", None)
    for rule, expected in zip(rules, wanted):
        got = rule.merge(models, weights)
        assert all(same(got[part][name], value) for part, values in expected.items() for name, value in values.items())
    assert calls == [11, 11, 11, 11, 11, 11, 7, 7, 11] and whole_models.median is coordinate_wise.median
