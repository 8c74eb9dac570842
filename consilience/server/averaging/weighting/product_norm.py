"""Weights by the norm of the adapters' products (HetLoRA, Cho et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Cohort, Notes
from consilience.core.settings import Checked
from consilience.core.tree import Tree
from consilience.layers.adapters import LORA, Factors, pairs_of


@dataclass(frozen=True, kw_only=True)
class ProductNorm(Checked):
    """|B_k A_k| / sum_j |B_j A_j|, the Frobenius norm over all adapted layers; equal if all are 0."""

    factors: Factors = LORA
    needs_each_reply = True  # norms of products need the factors

    def init(self, start: Tree, clients: int) -> Tree:
        """No state."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """Shares of the norms; example counts are ignored."""
        # Paper: one module. Here: the norm over all of them together, so that a client has one weight and its factors
        # are mixed with the leaves they were trained with.
        params = tree.here(cohort.reply["model"]["params"])
        squares = torch.stack([_square(params[p.a], params[p.b]) for p in pairs_of(params, self.factors, stacked=True)])
        sizes = squares.sum(0).clamp(min=0).sqrt()
        total = sizes.sum()
        weights = torch.where(total > 0, sizes / torch.where(total > 0, total, 1), 1 / len(cohort))
        return weights.to(cohort.examples.device), state, {}


def _square(a: Tensor, b: Tensor) -> Tensor:
    """[m] |B A|^2 = tr(B'B A A'), without the products [out, in]."""
    a, b = a.to(torch.float64), b.to(torch.float64)
    return ((b.mT @ b) * (a @ a.mT)).sum((1, 2))
