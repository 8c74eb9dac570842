"""Coordinate-wise robust rules: median and trimmed mean (Yin et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from consilience.core.settings import Checked
from consilience.core.tree import Tree, map_rows
from consilience.layers.grouped import has_triton
from consilience.server.averaging.combining.tolerance import Faulty, require

MOST_SORTED = 256  # models whose values a kernel of ours sorts in registers


@dataclass(frozen=True, kw_only=True)
class Median:
    """The middle value of every coordinate, or the mean of the two middle ones; weights are ignored."""

    needs_each_reply = True  # it sorts them
    uses_weights = False  # every reply counts the same

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> their median, floating buffers included."""
        return map_rows(median, models)


def median(stacked: Tensor) -> Tensor:
    """[m, ...] -> [...]; the largest for counters, `any` for flags."""
    if not stacked.is_floating_point():
        return stacked.any(0) if stacked.dtype == torch.bool else stacked.amax(0)
    return middle_of(ordered(stacked)).to(stacked.dtype)


def ordered(stacked: Tensor) -> Tensor:
    """[m, ...] every coordinate's values in ascending order."""
    if stacked.device.type == "cpu" and stacked.dtype in (torch.float32, torch.float64) and not stacked.requires_grad:
        return torch.from_numpy(np.sort(stacked.numpy(), axis=0))  # seven times faster than torch's
    if _sorts_by_kernel(stacked):
        from consilience.server.averaging.combining.sorting_kernel import sort_rows

        return sort_rows(stacked)
    return stacked.sort(dim=0).values


def _sorts_by_kernel(stacked: Tensor) -> bool:
    fits = stacked.is_cuda and stacked.dtype in (torch.float32, torch.float64) and len(stacked) <= MOST_SORTED
    return fits and stacked.numel() > 0 and not stacked.requires_grad and has_triton()


def middle_of(ordered: Tensor) -> Tensor:
    """[m, ...] in ascending order -> [...] the middle value, or the mean of the two, in float64."""
    count = len(ordered)
    low, high = ordered[(count - 1) // 2].to(torch.float64), ordered[count // 2].to(torch.float64)
    return (low + high) / 2


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Checked):
    """Of every coordinate, the mean without the f smallest and the f largest values; weights are ignored."""

    f: Faulty = 0.2
    needs_each_reply = True  # it sorts them
    uses_weights = False  # every reply counts the same

    def check_against(self, replies: int) -> None:
        """Refuse an f that trims all replies."""
        require("the trimmed mean", self.f, replies, times=2, plus=1)

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> their trimmed mean, floating buffers included."""
        count = len(weights)
        cut = require("the trimmed mean", self.f, count, times=2, plus=1)
        return map_rows(_trimmed, models, given=(cut,))


def _trimmed(stacked: Tensor, cut: int) -> Tensor:
    if not stacked.is_floating_point():
        return stacked.any(0) if stacked.dtype == torch.bool else stacked.amax(0)
    middle = ordered(stacked)[cut : len(stacked) - cut]
    return middle.mean(0, dtype=torch.float64).to(stacked.dtype)
