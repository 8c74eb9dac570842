"""The weighted mean of models, buffers included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.remote import RemoteTensor
from consilience.core.tree import Tree, leaves, map_leaves, map_rows

LARGE = 2**22  # values of all replies: a GPU copies fewer in the time in which the host launches a kernel


@dataclass(frozen=True, kw_only=True)
class WeightedMean:
    """sum_k weight_k w_k for floating values; the largest for counters, `any` for flags."""

    needs_each_reply = False  # a weighted sum is enough

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> their mean."""
        if weights.device.type != "cuda" or any(isinstance(leaf, RemoteTensor) for leaf in leaves(models)):
            return map_rows(weighted_mean, models, given=(weights,))
        return _all_at_once(lambda stacked: weighted_mean(stacked, weights), models)


def _all_at_once(merge: Callable[[Tensor], Tensor], models: Tree) -> Tree:
    """One kernel per dtype rather than per tensor: on a GPU, launching a hundred kernels takes longer than the sums.

    Large tensors are summed apart: to join them would take longer than another kernel.
    """
    groups: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for number, leaf in enumerate(leaves(models)):
        groups.setdefault((leaf.dtype, number if leaf.numel() >= LARGE else -1), []).append(leaf)
    merged: dict[int, Tensor] = {}
    for alike in groups.values():
        rows = [leaf.reshape(len(leaf), -1) for leaf in alike]
        total = merge(rows[0] if len(rows) == 1 else torch.cat(rows, 1))  # [m, P] -> [P]
        for leaf, part in zip(alike, total.split([row.shape[1] for row in rows])):
            merged[id(leaf)] = part.reshape(leaf.shape[1:])
    return map_leaves(lambda leaf: merged[id(leaf)], models)


def weighted_mean(stacked: Tensor, weights: Tensor) -> Tensor:
    """[m, ...] -> [...]; half precision is summed in single, so that a sum cannot overflow."""
    if not stacked.is_floating_point():
        return stacked.any(0) if stacked.dtype == torch.bool else stacked.amax(0)
    wide = torch.promote_types(stacked.dtype, torch.float32)
    total = weights.to(wide) @ stacked.to(wide).reshape(len(stacked), -1)  # [m] @ [m, P] -> [P]
    return total.reshape(stacked.shape[1:]).to(stacked.dtype)
