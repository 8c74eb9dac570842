"""A Triton kernel for medians, trimmed means and means around the median, which sorts every coordinate in registers.

A sort along the first dimension moves all values, and their places, through memory several times; here each value is
read once. A thread owns one coordinate and sorts its values by exchanges that are the same for all coordinates (a
bitonic sort). Imported where Triton is there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from consilience.layers.grouped import kernel_errors

PART = 8  # rows that are sorted in among the others at once
BLOCK = 128  # coordinates of a program, one for each thread
# a kernel serves any of these values: compiling one for each number of replies would take seconds every time
NUMBERS = ("count", "keep", "size", "s_row")


@triton.jit
def _sorted(values):
    """A tuple of 2^k integers in ascending order, at every coordinate."""
    if len(values) == 1:
        return values
    else:  # Triton would compile what follows a return
        return _merged(_sorted(values[: len(values) // 2]) + _sorted(values[len(values) // 2 :])[::-1])


@triton.jit
def _merged(values):
    """The same, of values that rise and then fall (Knuth, The Art of Computer Programming 3, section 5.3.4)."""
    if len(values) == 1:
        return values
    else:
        low, high = (), ()
        for k in tl.static_range(len(values) // 2):
            low = low + (tl.minimum(values[k], values[k + len(values) // 2]),)  # noqa: RUF005
            high = high + (tl.maximum(values[k], values[k + len(values) // 2]),)  # noqa: RUF005
        return _merged(low) + _merged(high)


@triton.jit
def _later(values, by, STEP: tl.constexpr):
    """The values that are `by` < 2 STEP places later; at the end, the last one."""
    if STEP == 0:
        return values
    else:
        last: tl.constexpr = len(values) - 1
        found = values[:0]
        for k in tl.static_range(last + 1):
            found = found + (tl.where((by & STEP) != 0, values[min(k + STEP, last)], values[k]),)  # noqa: RUF005
        return _later(found, by, STEP // 2)


@triton.jit
def _flipped(bits):
    """The bits of floats as integers in the order of the floats, or back: a negative float falls as its bits grow."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _wide(key):
    return _flipped(key).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _mean(keys, first, keep):
    """The mean of `keep` values from the `first` on, added up in ascending order."""
    total = tl.zeros_like(keys[0]).to(tl.float64)
    for k in tl.static_range(len(keys)):
        total += tl.where((k >= first) & (k < first + keep), _wide(keys[k]), 0.0)
    return total / keep.to(tl.float64)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=("source", "chosen", "target"))
def _middle(
    source, chosen, target, count, keep, size, s_row,
    SOME: tl.constexpr, AROUND: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """target [size]: the mean of the `keep` middle ones of `count` values.

    SOME: of the chosen rows only. AROUND: of the `keep` nearest to the median instead.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    step = s_row.to(tl.int64)
    nothing = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)  # comes last, as NaN does
    keys = (nothing,) * ROWS
    for start in range(0, count, PART):
        part = keys[:0]
        for k in tl.static_range(PART):
            row, here = start + k, start + k < count
            if SOME:
                row = tl.load(chosen + row, mask=here, other=0)
            value = tl.load(source + row * step + place, mask=place < tl.where(here, size, 0), other=float("nan"))
            key = _flipped(value.to(tl.int32, bitcast=True))
            part = part + (tl.where(value == value, key, nothing),)  # noqa: RUF005
        keys = _merged(keys[: ROWS - PART] + _sorted(part)[::-1])
    first = (count - keep) // 2 + tl.zeros_like(nothing)
    if AROUND:
        middle = _mean(keys, (count - 1) // 2, 2 - count % 2)
        later = _later(keys, keep, ROWS // 2)
        first = tl.zeros_like(nothing)  # the nearest begin one place later for every pair of which the larger is nearer
        for k in tl.static_range(ROWS):
            nearer = _wide(later[k]) - middle < middle - _wide(keys[k])
            first += tl.where(nearer & (k < count - keep), 1, 0)
    tl.store(target + place, _mean(keys, first, keep).to(tl.float32), mask=place < size)


def trimmed_mean(stacked: Tensor, keep: int) -> Tensor:
    """[m, ...] -> [...] the mean of the `keep` middle values of every coordinate."""
    return _launched(stacked, None, keep, around=False)


def around_median(stacked: Tensor, chosen: Tensor, keep: int) -> Tensor:
    """[m, ...] -> [...] of the chosen rows, the mean of the `keep` values nearest to the median."""
    return _launched(stacked, chosen, keep, around=True)


def _launched(stacked: Tensor, chosen: Tensor | None, keep: int, *, around: bool) -> Tensor:
    flat = stacked.reshape(len(stacked), -1)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    count, size = len(flat) if chosen is None else len(chosen), flat.shape[1]
    target = torch.empty(stacked.shape[1:], dtype=flat.dtype, device=flat.device)
    rows = max(PART, triton.next_power_of_2(count))
    with torch.cuda.device_of(flat), kernel_errors():
        _middle[(triton.cdiv(size, BLOCK),)](
            flat, flat if chosen is None else chosen, target, count, keep, size, flat.stride(0),
            SOME=chosen is not None, AROUND=around, ROWS=rows, PART=PART, BLOCK=BLOCK, num_warps=BLOCK // 32,
        )  # fmt: skip
    return target
