"""FedIT: averages LoRA adapters factor by factor."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._adapters import adapted
from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.layers.adapters import LORA, Factors


@recipe
def fedit(*, factors: Factors = LORA, **common: Unpack[Common]) -> Algorithm:
    """Zhang et al. 2024: A = sum_k (N_k / N) A_k and B = sum_k (N_k / N) B_k, where a layer computes W x + s B A x.

    FedAvg of what is trained, the adapters and any head; W is a constant. `factors` are the components of the
    parameters' names that mark A [r, in] and B [out, r]: those of `peft` by default. A model without adapters is
    refused.

    Use when: as the baseline for adapters, or when the server may see only sums.
    Not when: clients do many local steps: B A of the averages is not the average of the B_k A_k.
    Cost: r (in + out) numbers each way for a layer, instead of in x out.
    """
    return adapted(averaged(**common), factors)
