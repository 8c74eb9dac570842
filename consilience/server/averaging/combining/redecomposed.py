"""Adapters merged as products and decomposed again (FlexLoRA, Bai et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.capabilities import Reasons, Wraps, capability
from consilience.core.tree import Tree
from consilience.layers.adapters import LORA, Factors, others, pairs_of, product
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.protocols import Combine, CombineAround

Split = Literal["even", "b"]
NEGLIGIBLE = 1e-12  # singular values below this share of the largest are rounding


@dataclass(frozen=True, kw_only=True)
class Redecomposed(Wraps):
    """D = sum_k weight_k B_k A_k = U S V', of which B A is the best approximation of the adapter's rank r.

    `split` says which factor has the singular values: both their roots, B = U_r S_r^1/2 and A = S_r^1/2 V_r', or B all
    of them, B = U_r S_r and A = V_r'.

    `combine` merges the products and all leaves that are not adapters; the mean of products is computed from their
    factors, other rules receive each product [out, in]. A direction that D does not use keeps the broadcast row of A,
    with a zero column of B.
    """

    combine: Combine = field(default_factory=WeightedMean)
    split: Split = "even"
    factors: Factors = LORA
    holds = "combine"
    replaces: ClassVar[Reasons] = {
        CombineAround: "its rank is that of the broadcast model, which the rule inside is given as products"
    }
    needs_each_reply = True  # a product of sums is not the sum of the products

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """As `merge_around` with the first model as centre."""
        return self.merge_around(models, weights, tree.rows(models, 0))

    def merge_around(self, models: Tree, weights: Tensor, centre: Tree) -> Tree:
        """Stacked models [m, ...] -> one, whose adapters have the broadcast model's rank."""
        models = tree.here(models)
        params = models["params"]
        pairs = pairs_of(params, self.factors, stacked=True)
        rest = others(params, pairs)
        if isinstance(self.combine, WeightedMean):
            merged = self.combine.merge({**models, "params": rest}, weights)
            stacked = {pair: stack(params[pair.a], params[pair.b], weights) for pair in pairs}
            found = {pair: svd_of_product(b, a) for pair, (a, b) in stacked.items()}
        else:
            dense = {pair.key: product(params, pair) for pair in pairs}
            start = {pair.key: product(centre["params"], pair) for pair in pairs}
            around = {**centre, "params": {**others(centre["params"], pairs), **start}}
            merged = merge_by(self.combine, {**models, "params": {**rest, **dense}}, weights, around)
            found = {pair: _svd(merged["params"].pop(pair.key).to(torch.float64)) for pair in pairs}
        factors: Tree = {}
        for pair, (u, s, vh) in found.items():
            a, b = truncated(u, s, vh, centre["params"][pair.a].to(torch.float64), self.split)
            factors |= {pair.a: a.to(params[pair.a].dtype), pair.b: b.to(params[pair.b].dtype)}
        together = {**merged["params"], **factors}
        return {**merged, "params": {name: together[name] for name in params}}


def merge_by(combine: Combine, models: Tree, weights: Tensor, centre: Tree) -> Tree:
    """The models merged by a combining rule, around the broadcast model if the rule uses it."""
    around = capability(combine, CombineAround)
    return combine.merge(models, weights) if around is None else around.merge_around(models, weights, centre)


def stack(a: Tensor, b: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """A [m r, in] and B [out, m r] in float64 whose product is sum_k weight_k B_k A_k (FLoRA's stacking)."""
    wide = (weights.reshape(-1, 1, 1).to(b.device) * b.to(torch.float64)).permute(1, 0, 2)  # [out, m, r]
    return a.to(torch.float64).flatten(0, 1), wide.flatten(1)


def svd_of_product(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition of B A, by that of a matrix of at most the stacked rank, exactly."""
    left, core_left = torch.linalg.qr(b)
    right, core_right = torch.linalg.qr(a.mT)
    u, s, vh = _svd(core_left @ core_right.mT)
    return left @ u, s, vh @ right.mT


def truncated(u: Tensor, s: Tensor, vh: Tensor, before: Tensor, split: Split) -> tuple[Tensor, Tensor]:
    """(A, B) of the rank of `before` [r, in], the broadcast A, whose rows are kept where there is no direction.

    With a zero row of A and a zero column of B, the direction could never be learned again.
    """
    rank = len(before)
    used = (s[:rank] > NEGLIGIBLE * s[:1]) & (s[:rank] > 0)
    count = len(used)
    rows = vh[:rank]
    # a singular pair is unique up to a sign: the entry of V' that is largest in size is positive
    sign = rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()  # [count, 1]
    a, b = before.clone(), u.new_zeros(len(u), rank)
    shared = s[:count].sqrt() if split == "even" else torch.ones_like(s[:count])  # A's part of the singular values
    a[:count] = torch.where(used.unsqueeze(1), rows * sign * shared.unsqueeze(1), before[:count])
    b[:, :count] = torch.where(used, u[:, :count] * (s[:count] / torch.where(used, shared, 1)) * sign.T, 0.0)
    return a, b


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u, s, vh
