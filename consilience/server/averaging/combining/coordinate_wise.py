"""Coordinate-wise robust rules: median and trimmed mean (Yin et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from consilience.core.settings import Checked
from consilience.core.tree import Tree, map_rows
from consilience.layers.grouped import runs_kernels
from consilience.server.averaging.combining.tolerance import Faulty, require

FEW = 128  # models whose values of one coordinate a thread of a GPU sorts in its registers


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
    return trimmed_mean(stacked, (len(stacked) - 1) // 2)


def trimmed_mean(stacked: Tensor, cut: int) -> Tensor:
    """[m, ...] -> [...] without the `cut` smallest and largest values; the largest for counters, `any` for flags."""
    if not stacked.is_floating_point():
        return stacked.any(0) if stacked.dtype == torch.bool else stacked.amax(0)
    if sorts_in_registers(stacked, len(stacked)):
        from consilience.layers import order_statistics_kernels as kernels

        return kernels.trimmed_mean(stacked, len(stacked) - 2 * cut)
    middle = ordered(stacked)[cut : len(stacked) - cut]
    return middle.mean(0, dtype=torch.float64).to(stacked.dtype)


def sorts_in_registers(stacked: Tensor, count: int) -> bool:
    """Whether `order_statistics_kernels` compute this from `count` rows: single precision, on a GPU with Triton."""
    plain = stacked.dtype == torch.float32 and not stacked.requires_grad and stacked.numel() > 0
    return plain and count <= FEW and runs_kernels(stacked)


def ordered(stacked: Tensor) -> Tensor:
    """[m, ...] every coordinate's values in ascending order."""
    if stacked.device.type == "cpu" and stacked.dtype in (torch.float32, torch.float64) and not stacked.requires_grad:
        return torch.from_numpy(np.sort(stacked.numpy(), axis=0))  # seven times faster than torch's
    return stacked.sort(dim=0).values


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
        return map_rows(trimmed_mean, models, given=(cut,))
