"""Bulyan (El Mhamdi et al. 2018): Krum over and over, then the values nearest to the median."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from consilience.core.settings import check
from consilience.core.tree import Tree, map_rows
from consilience.server.averaging.combining.coordinate_wise import median
from consilience.server.averaging.combining.krum import Neighbours, scores
from consilience.server.averaging.combining.tolerance import Faulty, require
from consilience.server.averaging.combining.whole_models import distances, middle_buffers


@dataclass(frozen=True, kw_only=True)
class Bulyan:
    """n - 2f models, each chosen by Krum from those left; then, of every coordinate, the mean of the n - 4f values
    nearest to the median. Weights play no part."""

    f: Faulty = 0.1
    neighbours: Neighbours = "n-f-1"
    needs_each_reply = True  # it chooses among them
    uses_weights = False  # every reply counts the same

    def __post_init__(self) -> None:
        check(self)

    def check_against(self, replies: int) -> None:
        """Refuse an f that leaves too few replies to choose from."""
        require("Bulyan", self.f, replies, times=4, plus=3)

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> one model, with the median of all buffers."""
        count = len(weights)
        number = require("Bulyan", self.f, count, times=4, plus=3)
        chosen = torch.from_numpy(self._chosen(distances(models), number))
        params = map_rows(_merged, models["params"], given=(chosen, count - 4 * number))
        return {"params": params, "buffers": middle_buffers(models)}

    def _chosen(self, distance: np.ndarray, f: int) -> np.ndarray:
        """Ascending numbers of the models that Krum picks, one after another."""
        left, chosen = np.arange(len(distance)), []
        for _ in range(len(distance) - 2 * f):
            apart = distance[np.ix_(left, left)]
            # when one neighbour counts, the two nearest models always tie: the one nearer to all goes first
            first = np.lexsort((apart.sum(1), scores(apart, f, self.neighbours)))[0]
            chosen.append(left[first])
            left = np.delete(left, first)
        return np.sort(chosen)


def _merged(stacked: Tensor, chosen: Tensor, keep: int) -> Tensor:
    return around_median(stacked[chosen.to(stacked.device)], keep)


def around_median(stacked: Tensor, keep: int) -> Tensor:
    """[m, ...] -> [...] the mean of the `keep` values nearest to the median; of two as near, the smaller."""
    ordered = stacked.to(torch.float64).sort(dim=0).values
    nearest = (ordered - median(ordered)).abs().argsort(dim=0, stable=True)[:keep]
    return ordered.gather(0, nearest).mean(0).to(stacked.dtype)
