"""FFA-LoRA: LoRA with A frozen; only B is trained."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._adapters import adapted
from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.layers.adapters import LORA, Factors


@recipe
def ffa_lora(*, factors: Factors = LORA, **common: Unpack[Common]) -> Algorithm:
    """Sun et al. 2024: every A stays at its initial value, the same for all, and B = sum_k (N_k / N) B_k.

    The average is exact, (sum_k p_k B_k) A = sum_k p_k (B_k A), and noise that is added to B (privacy) is not
    multiplied by noise in A. A is made a constant of the model: it is never sent, and no part of the algorithm sees it.
    `factors` as in fedit.

    Use when: the server may see only sums, for differential privacy (or freeze A in the module and use dp_fedavg), or
    to halve FedIT's traffic.
    Not when: the rank is small: a random A then spans too few directions.
    Cost: r x out numbers each way for a layer.
    """
    # Paper: A is drawn as usual for LoRA, or orthogonal, which did no better. Here: the module's own A.
    return adapted(averaged(**common), factors, freeze_a=True)
