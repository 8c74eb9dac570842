"""FedAvg: local SGD, then a weighted average."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm


@recipe
def fedavg(**common: Unpack[Common]) -> Algorithm:
    """McMahan et al. 2017: w = sum_k (N_k / N) w_k after local SGD from the global model.

    `weighting=UniformWeights()` gives the plain mean that some papers call FedAvg.

    Use when: clients have similar data, or as the baseline.
    Not when: clients are heterogeneous and do many local steps: it then converges away from the optimum.
    """
    return averaged(**common)
