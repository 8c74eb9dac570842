"""FlexLoRA: averages LoRA products, any client rank."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._adapters import Ranks, adapted, refuse_what_follows_factors
from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.layers.adapters import LORA, Factors
from consilience.server.averaging.combining.redecomposed import Redecomposed, Split
from consilience.server.averaging.combining.weighted_mean import WeightedMean


@recipe
def flexlora(
    *, ranks: Ranks | None = None, split: Split = "even", factors: Factors = LORA, **common: Unpack[Common]
) -> Algorithm:
    """Bai et al. 2024: D = sum_k (N_k / N) B_k A_k = U S V', of which client k receives the first r_k directions.

    `ranks` are the clients' ranks in the order of their numbers, repeated if there are more clients; by default
    all have the rank of the model's adapters, which is the largest. Factors keep the model's shapes, and are 0 beyond a
    client's rank. `combine` merges the products (default: weighted mean) and everything that is not an adapter.
    `split`: B = U S^1/2 and A = S^1/2 V' ("even"), or B = U S and A = V' ("b"). `factors` as in fedit.

    Use when: clients can afford different ranks, or averages of factors are too inexact.
    Not when: the server may see only sums, or the rank of D is much higher than the adapters': the rest is lost.
    Cost: FedIT's traffic; the server decomposes each layer, from the stacked factors.
    """
    # Paper: which factor has the singular values, and the scaling of different ranks, did not become clear to us. Here:
    # the roots in both, because with all in B the same learning rate diverged sooner; and the module's scaling for all
    # ranks, so that cutting a rank off leaves the other directions as they are.
    usual = averaged(**common)
    refuse_what_follows_factors(usual, "FlexLoRA's factors are of another basis in every round", steps=True)
    common["combine"] = Redecomposed(combine=common.get("combine", WeightedMean()), split=split, factors=factors)
    return adapted(averaged(**common), factors, ranks=ranks)
