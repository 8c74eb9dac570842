"""HetLoRA: zero-padded LoRA of different ranks."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._adapters import Ranks, adapted
from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.layers.adapters import LORA, Factors
from consilience.server.averaging.weighting.product_norm import ProductNorm


@recipe
def hetlora(*, ranks: Ranks, factors: Factors = LORA, **common: Unpack[Common]) -> Algorithm:
    """Cho et al. 2024: factors of rank r_k are zero-padded, A = sum_k p_k A_k, p_k ~ |B_k A_k|, B alike.

    A client receives the first r_k rows of A and columns of B. `ranks` as in flexlora, `factors` as in fedit.

    Use when: as the baseline for FlexLoRA and FLoRA where ranks differ.
    Not when: the server may see only sums; or few clients have a large rank, whose directions are then averaged with
    zeros.
    Cost: FedIT's.
    """
    # Paper: clients also prune their ranks while they train, with a penalty on the last directions. Here: ranks are
    # given, because a rank that changes is not known to the server before the round.
    common.setdefault("weighting", ProductNorm(factors=factors))
    return adapted(averaged(**common), factors, ranks=ranks)
