"""FedAtt: layer-wise attention between the global model and the replies (Ji et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from consilience.core.settings import Checked, Positive, Range
from consilience.core.tree import Tree, map_rows
from consilience.server.averaging.combining.weighted_mean import weighted_mean

Norm = Annotated[float, Range(least=1)]


@dataclass(frozen=True, kw_only=True)
class Attention(Checked):
    """w^l <- w^l - epsilon sum_k att_k^l (w^l - w_k^l), with att^l = softmax over k of |w^l - w_k^l|_p.

    A layer is one named parameter. Floating buffers are averaged by each client's mean attention over the layers.
    """

    # Paper: "similarity", so near clients should count more. Here: as printed, the softmax of the *distance*, so far
    # clients count more; the authors' code has the same sign.
    epsilon: Positive = 1.0
    p: Norm = 2.0  # entry-wise: the authors' code takes the spectral norm of matrices at p = 2
    needs_each_reply = True  # attention needs every layer of every model
    uses_weights = False  # attention takes their place

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """As `merge_around` with the weighted mean as centre, for when the broadcast model is not known."""
        return self.merge_around(models, weights, map_rows(weighted_mean, models, given=(weights,)))

    def merge_around(self, models: Tree, weights: Tensor, centre: Tree) -> Tree:
        """Stacked models [m, ...] that started from `centre` -> one model."""
        before, layers = centre["params"], self.layers(models, centre)
        merged = map_rows(weighted_mean, models["params"], layers)
        if self.epsilon != 1:  # the attention sums to one, so that sum_k att_k (w - w_k) = w - merged
            merged = {name: before[name] + self.epsilon * (merged[name] - before[name]) for name in merged}
        typical = torch.stack(list(layers.values())).mean(0)
        return {"params": merged, "buffers": map_rows(weighted_mean, models["buffers"], given=(typical,))}

    def layers(self, models: Tree, centre: Tree) -> dict[str, Tensor]:
        """[m] attention of every parameter, by name."""
        anchors = {name: centre["params"][name] for name in models["params"]}
        return map_rows(attention, models["params"], anchors, given=(self.p,))


def attention(stacked: Tensor, anchor: Tensor, p: float) -> Tensor:
    """[m] float64: softmax of the clients' distances from the anchor in one layer; uniform for an empty layer."""
    apart = stacked.reshape(len(stacked), -1).to(torch.float64) - anchor.reshape(1, -1).to(torch.float64)
    if not apart.numel():
        return torch.full((len(stacked),), 1 / len(stacked), dtype=torch.float64, device=stacked.device)
    largest = apart.abs().amax()
    unit = torch.where(largest > 0, largest, 1.0)  # so that no power overflows
    return torch.softmax(unit * torch.linalg.vector_norm(apart / unit, ord=p, dim=1), 0)
