"""SimAgg: separate aggregation weights for every tensor (Khan et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.settings import Checked, Positive
from consilience.core.tree import Tree, map_rows
from consilience.server.averaging.combining.weighted_mean import weighted_mean


@dataclass(frozen=True, kw_only=True)
class SimAgg(Checked):
    """Per tensor: share_k ~ u_k + v_k, u_k ~ 1 / (sum |p_k - mean p| + eps) over its entries, v_k the weight given.

    Floating buffers are tensors like any other; counters take the largest.
    """

    eps: Positive = 1e-5
    needs_each_reply = True  # distances need every tensor

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> one."""
        return map_rows(self._merge, models, given=(weights,))

    def _merge(self, stacked: Tensor, weights: Tensor) -> Tensor:
        if not stacked.is_floating_point():
            return weighted_mean(stacked, weights)
        return weighted_mean(stacked, self.shares(stacked, weights))

    def shares(self, stacked: Tensor, weights: Tensor) -> Tensor:
        """[m] float64 shares of one tensor [m, ...]."""
        flat = stacked.reshape(len(stacked), -1).to(torch.float64)
        # Paper (SimProx's account of it): compares with the global model. Authors' code: |sum p_k - sum mean p|, zero
        # for any two tensors with equal sums. Here: the sum of the absolute differences from the mean of the round.
        apart = (flat - flat.mean(0)).abs().sum(1).clamp(max=torch.finfo(torch.float64).max)
        close = 1 / (apart + self.eps)
        both = close / close.sum() + weights.to(close)
        return both / both.sum()
