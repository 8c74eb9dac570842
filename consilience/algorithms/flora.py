"""FLoRA: merges LoRA products into the model exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._adapters import Ranks, adapted, refuse_what_follows_factors
from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.layers.adapters import LORA, Factors
from consilience.server.averaging.averaging import Averaging
from consilience.server.rules.merged_adapters import MergedAdapters


@recipe
def flora(*, ranks: Ranks | None = None, factors: Factors = LORA, **common: Unpack[Common]) -> Algorithm:
    """Wang et al. 2024: W <- W + s [p_1 B_1 ... p_m B_m] [A_1; ...; A_m] = W + s sum_k p_k B_k A_k, p_k = N_k / N.

    Each layer has the merged sum as a buffer [out, in], and each round begins with new adapters, B = 0. `weighting`,
    `combine` and `step` act on these dense models. `ranks` as in flexlora, `factors` as in fedit.

    Use when: clients have different ranks, or the model must change by more than one adapter can.
    Not when: downloads must be small, or the server may see only sums.
    Cost: up r (in + out) numbers for a layer, down in x out more.
    """
    # Paper: the server sends the stacked factors, of rank r_1 + ... + r_m, and each client adds their product to its W.
    # Here: it sends the sum of all products so far, because a client that missed a round would lack some, and because
    # trees keep their shapes; the numbers of the model are the same.
    usual = averaged(**common)
    refuse_what_follows_factors(usual, "FLoRA's adapters begin anew in every round", steps=False)
    server = usual.server
    assert isinstance(server, Averaging)
    dense = MergedAdapters(weighting=server.weighting, combine=server.combine, step=server.step, factors=factors)
    return adapted(replace(usual, server=dense), factors, ranks=ranks, merges=True)
