"""Nearest-neighbour mixing in front of another rule (Allouah et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from consilience.core.capabilities import Wraps, capability
from consilience.core.tree import Tree, map_leaves
from consilience.server.averaging.combining.coordinate_wise import TrimmedMean
from consilience.server.averaging.combining.tolerance import Faulty, require
from consilience.server.averaging.combining.whole_models import distances, least
from consilience.server.protocols import Combine, CombineAround, Tolerant


@dataclass(frozen=True, kw_only=True)
class NearestNeighbourMixing(Wraps):
    """Every model becomes the mean of its n - f nearest (itself included), `then` merges them.

    Only parameters are mixed: buffers, which the distances ignore, are passed to `then` unchanged.
    """

    f: Faulty = 0.2
    then: Combine = field(default_factory=TrimmedMean)
    holds = "then"
    needs_each_reply = True  # it measures distances between them

    def check_against(self, replies: int) -> None:
        """Refuse an f that lets faulty replies be the majority, or that `then` refuses."""
        require("nearest-neighbour mixing", self.f, replies, times=2, plus=1)
        tolerant = capability(self.then, Tolerant)
        if tolerant is not None:
            tolerant.check_against(replies)

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> one model."""
        return self.then.merge(self._mixed(models), weights)

    def merge_around(self, models: Tree, weights: Tensor, centre: Tree) -> Tree:
        """Stacked models [m, ...] -> one model near `centre`, if `then` uses it."""
        around = capability(self.then, CombineAround)
        if around is not None:
            return around.merge_around(self._mixed(models), weights, centre)
        return self.merge(models, weights)

    def _mixed(self, models: Tree) -> Tree:
        distance = distances(models)
        count = len(distance)
        number = require("nearest-neighbour mixing", self.f, count, times=2, plus=1)
        nearest = least(distance, count - number)  # [m, n - f]
        mixing = np.zeros((count, count))
        np.put_along_axis(mixing, nearest, 1 / (count - number), axis=1)

        def mix(stacked: Tensor) -> Tensor:
            share = torch.from_numpy(mixing).to(stacked.device)
            flat = stacked.reshape(count, -1).to(torch.float64)
            return (share @ flat).reshape(stacked.shape).to(stacked.dtype)

        return {"params": map_leaves(mix, models["params"]), "buffers": models["buffers"]}
