"""FedAtt: aggregation weights by layer-wise attention."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import NonNegative, Positive, Whole
from consilience.server.averaging.combining.attention import Attention, Norm
from consilience.server.averaging.steps.plain import Noisy, Replace


@recipe
def fedatt(
    *,
    epsilon: Positive = 1.0,
    p: Norm = 2.0,
    noise: NonNegative = 0.0,
    noise_seed: Whole = 0,
    **common: Unpack[Common],
) -> Algorithm:
    """Ji et al. 2019: w^l <- w^l - epsilon sum_k softmax_k(|w^l - w_k^l|_p) (w^l - w_k^l) for every layer l.

    As printed, distant clients get more weight. `noise`: standard deviation of Gaussian noise on the new parameters.

    Use when: clients whose model changed most should get most weight, layer by layer.
    Not when: clients may diverge or attack (large updates get more weight), or the server may see only sums.
    Cost: O(m P) at the server.
    """
    common.setdefault("combine", Attention(epsilon=epsilon, p=p))
    if noise:
        common["step"] = Noisy(deviation=noise, seed=noise_seed, step=common.get("step") or Replace())
    return averaged(**common)
