"""Centred clipping (Karimireddy et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.settings import Checked, Count, Positive
from consilience.core.tree import Tree, map_rows
from consilience.server.averaging.combining.coordinate_wise import median
from consilience.server.averaging.combining.whole_models import coordinates, middle_buffers


@dataclass(frozen=True, kw_only=True)
class CentredClipping(Checked):
    """v <- v + sum_k weight_k (w_k - v) min(1, tau / |w_k - v|), from the model that was broadcast.

    No reply moves the model further than weight_k tau. Without `tau` it is the median of the |w_k - v|.
    """

    # Paper: v starts from the last aggregate, which a server must keep. Here: from the broadcast model, which is that
    # aggregate when the models themselves are clipped, so that a bad round cannot affect the centre of later ones.
    tau: Positive | None = None
    iterations: Count = 1
    needs_each_reply = True  # it clips each reply
    uses_weights = True  # they weigh the clipped differences

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """As `merge_around` with the coordinate-wise median as centre, for when the broadcast model is not known."""
        return self.merge_around(models, weights, map_rows(median, models))

    def merge_around(self, models: Tree, weights: Tensor, centre: Tree) -> Tree:
        """Stacked models [m, ...] -> one model near `centre`."""
        points = coordinates(models, centre)  # [m, r], the centre at the origin
        weights = weights.to(points)
        share = torch.zeros_like(weights)  # v = centre + sum_k share_k (w_k - centre)
        for _ in range(self.iterations):
            distance = torch.linalg.vector_norm(points - share @ points, dim=1)
            limit = distance.quantile(0.5) if self.tau is None else torch.full_like(distance[0], self.tau)
            step = weights * (limit / distance.clamp(min=torch.finfo(distance.dtype).tiny)).clamp(max=1)
            share = share * (1 - step.sum()) + step
        params = map_rows(_moved, models["params"], centre["params"], given=(share,))
        return {"params": params, "buffers": middle_buffers(models)}


def _moved(stacked: Tensor, start: Tensor, share: Tensor) -> Tensor:
    """[...] start + sum_k share_k (w_k - start)."""
    apart = stacked.to(torch.float64) - start.to(torch.float64)
    return (start + torch.tensordot(share, apart, dims=1)).to(start.dtype)
