"""The coordinate-wise median (Yin et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.tree import Tree, map_rows


@dataclass(frozen=True, kw_only=True)
class Median:
    """The middle value of every coordinate, or the mean of the two middle ones; weights play no part."""

    @property
    def needs_each_reply(self) -> bool:
        """It sorts them."""
        return True

    @property
    def uses_weights(self) -> bool:
        """Every reply counts the same."""
        return False

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> their median, floating buffers included."""
        return map_rows(median, models)


def median(stacked: Tensor) -> Tensor:
    """[m, ...] -> [...]; the largest for counters, `any` for flags."""
    if not stacked.is_floating_point():
        return stacked.any(0) if stacked.dtype == torch.bool else stacked.amax(0)
    count, ordered = len(stacked), stacked.sort(dim=0).values
    low, high = ordered[(count - 1) // 2].to(torch.float64), ordered[count // 2].to(torch.float64)
    return ((low + high) / 2).to(stacked.dtype)
