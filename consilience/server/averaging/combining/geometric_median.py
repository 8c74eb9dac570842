"""The geometric median: robust federated aggregation (Pillutla et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.settings import Checked, Count, NonNegative, Positive
from consilience.core.tree import Tree, map_rows
from consilience.server.averaging.combining.coordinate_wise import median
from consilience.server.averaging.combining.whole_models import coordinates, mean_of


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Checked):
    """The model v with the least sum_k weight_k |w_k - v|, by the smoothed Weiszfeld iteration from the mean.

    Distances below `nu` count as `nu`. It stops once a step is shorter than `tolerance` times the median distance.
    """

    nu: Positive = 1e-6
    tolerance: NonNegative = 1e-10
    iterations: Count = 1000
    needs_each_reply = True  # it measures distances to them
    uses_weights = True  # a reply of weight 2 counts as two

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> their geometric median over the parameters."""
        points = coordinates(models, map_rows(median, models))  # [m, r] relative to the median, for precision
        weights = weights.to(points)
        share = weights / weights.sum()
        place = share @ points
        for _ in range(self.iterations):
            distance = torch.linalg.vector_norm(points - place, dim=1)
            pull = weights / distance.clamp(min=self.nu)
            share = pull / pull.sum()
            before, place = place, share @ points
            moved = torch.linalg.vector_norm(place - before)
            if bool(moved <= self.tolerance * distance.median()):
                break
        return mean_of(models, share)
