"""A Triton kernel that sorts every coordinate's values over some dozens of models in registers.

PyTorch sorts along another dimension than the last by moving the data and sorting each coordinate by radix, with its
place in the order beside every value: for 50 models that takes most of the time of a robust merge. Imported where
Triton is there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUES = 4096  # of one program


@triton.jit
def _sort(source, target, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    places = row[None, :] * columns + column[:, None]
    inside = (row < rows)[None, :] & (column < columns)[:, None]
    values = tl.load(source + places, mask=inside, other=float("inf"))
    tl.store(target + places, tl.sort(values), mask=inside)


def sort_rows(stacked: Tensor) -> Tensor:
    """[m, ...] with each coordinate's values in ascending order; they must be numbers or infinite."""
    stacked = stacked.contiguous()
    target = torch.empty_like(stacked)
    rows, columns = len(stacked), stacked[0].numel()
    size = max(2, triton.next_power_of_2(rows))
    block = max(1, VALUES // size)
    with torch.cuda.device_of(stacked):
        _sort[(triton.cdiv(columns, block),)](stacked, target, rows, columns, ROWS=size, BLOCK=block, num_warps=4)
    return target
