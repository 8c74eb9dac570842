"""Selection by nearest neighbours: Krum, Multi-Krum (Blanchard et al. 2017), Bulyan (El Mhamdi et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core.settings import Checked, Count, Invalid
from consilience.core.tree import Tree, map_rows, rows
from consilience.server.averaging.combining.coordinate_wise import middle_of, ordered, sorts_in_registers
from consilience.server.averaging.combining.tolerance import Faulty, require
from consilience.server.averaging.combining.whole_models import distances, least, mean_of, middle_buffers

Neighbours = Literal["n-f-1", "n-f-2"]
# Paper: the n - f - 2 nearest others. Here: n - f - 1 by default, the number of other honest replies, as in the `byzfl`
# package and later analyses (Allouah et al. 2023); "n-f-2" is the paper's.


@dataclass(frozen=True, kw_only=True)
class Krum(Checked):
    """The one model with the least mean squared distance to its nearest others; the first in client order if tied."""

    f: Faulty = 0.2
    neighbours: Neighbours = "n-f-1"
    needs_each_reply = True  # it chooses among them
    uses_weights = False  # every reply counts the same

    def check_against(self, replies: int) -> None:
        """Refuse an f that leaves too few neighbours."""
        require("Krum", self.f, replies, times=2, plus=3)

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> one of them, with the median of all buffers."""
        number = require("Krum", self.f, len(weights), times=2, plus=3)
        best = int(np.argmin(scores(distances(models), number, self.neighbours)))
        return {"params": rows(models["params"], best), "buffers": middle_buffers(models)}


@dataclass(frozen=True, kw_only=True)
class MultiKrum(Checked):
    """The plain mean of the `keep` models (n - f unless given) that score best by Krum."""

    f: Faulty = 0.2
    keep: Count | None = None
    neighbours: Neighbours = "n-f-1"
    needs_each_reply = True  # it chooses among them
    uses_weights = False  # every reply that is kept counts the same

    def check_against(self, replies: int) -> None:
        """Refuse an f that leaves too few neighbours, and a `keep` that must include faulty replies."""
        number = require("Multi-Krum", self.f, replies, times=2, plus=3)
        if self.keep is not None and self.keep > replies - number:
            raise Invalid(
                f"Multi-Krum with keep = {self.keep} and f = {number} needs keep <= n - f = {replies - number}, "
                f"where n = {replies}: lower keep or f"
            )

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> the mean of the best, with the median of all buffers."""
        count = len(weights)
        self.check_against(count)
        number = require("Multi-Krum", self.f, count, times=2, plus=3)
        kept = least(scores(distances(models), number, self.neighbours), self.keep or count - number)
        share = torch.zeros_like(weights, dtype=torch.float64)
        share[torch.from_numpy(kept).to(share.device)] = 1 / len(kept)
        return mean_of(models, share)


def scores(distance: np.ndarray, f: int, neighbours: Neighbours) -> np.ndarray:
    """[m] mean squared distances to the nearest others, at least one if there is one."""
    with np.errstate(over="ignore"):
        return _scores(np.sort(distance**2, axis=1), f, neighbours)


def _scores(squared: np.ndarray, f: int, neighbours: Neighbours) -> np.ndarray:
    """The same from squared distances, in every row in ascending order."""
    count = len(squared)
    near = max(1, count - f - (1 if neighbours == "n-f-1" else 2))
    if count == 1:
        return np.zeros(1)
    nearest: np.ndarray = squared[:, 1 : 1 + near]  # the nearest of all is the model itself
    return nearest.sum(axis=1) / near


@dataclass(frozen=True, kw_only=True)
class Bulyan(Checked):
    """n - 2f models, each chosen by Krum from those left; then, of every coordinate, the mean of the n - 4f values
    nearest to the median. Weights are ignored."""

    f: Faulty = 0.1
    neighbours: Neighbours = "n-f-1"
    needs_each_reply = True  # it chooses among them
    uses_weights = False  # every reply counts the same

    def check_against(self, replies: int) -> None:
        """Refuse an f that leaves too few replies to choose from."""
        require("Bulyan", self.f, replies, times=4, plus=3)

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> one model, with the median of all buffers."""
        count = len(weights)
        number = require("Bulyan", self.f, count, times=4, plus=3)
        chosen = torch.from_numpy(self._chosen(distances(models), number)).to(weights.device)
        params = map_rows(around_median, models["params"], given=(chosen, count - 4 * number))
        return {"params": params, "buffers": middle_buffers(models)}

    def _chosen(self, distance: np.ndarray, f: int) -> np.ndarray:
        """Ascending indices of the models that Krum picks, one after another."""
        with np.errstate(over="ignore"):
            squared, left = distance**2, np.arange(len(distance))
            order = squared.argsort(axis=1)
            squared = np.take_along_axis(squared, order, axis=1)  # sorted once: rows stay so when one model leaves
            for count in range(len(distance), 2 * f, -1):
                found = _scores(squared, f, self.neighbours)
                best = np.flatnonzero(found == found.min())
                # when one neighbour counts, the two nearest models always tie: the one nearer to all goes first
                first = best[distance[np.ix_(left[best], left)].sum(1).argmin()] if len(best) > 1 else best[0]
                stays, left = order != left[first], left[left != left[first]]
                stays[first] = False
                order, squared = (part[stays].reshape(count - 1, count - 1) for part in (order, squared))
        return np.setdiff1d(np.arange(len(distance)), left)


def around_median(stacked: Tensor, chosen: Tensor, keep: int) -> Tensor:
    """[m, ...] -> [...] of the chosen rows, the mean of the `keep` values nearest to the median.

    Of two as near, the smaller counts.
    """
    chosen = chosen.to(stacked.device)
    if sorts_in_registers(stacked, len(chosen)):
        from consilience.layers import order_statistics_kernels as kernels

        return kernels.around_median(stacked, chosen, keep)
    values = ordered(stacked[chosen])
    middle = middle_of(values)
    # the nearest follow each other: they begin one place later for every pair of which the larger is nearer
    later = values[keep:] - middle < middle - values[: len(values) - keep]
    first = later.sum(0, keepdim=True)
    places = first + torch.arange(keep, device=first.device).reshape(-1, *(1,) * (first.dim() - 1))
    nearest = values.gather(0, places)
    if stacked.dtype == torch.float64:  # sums of narrower types are exact; these depend on the order: nearest first
        nearest = nearest.gather(0, (nearest - middle).abs().argsort(dim=0, stable=True))
    return nearest.mean(0, dtype=torch.float64).to(stacked.dtype)
