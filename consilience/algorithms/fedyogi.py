"""FedYogi: Yogi at the server."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Decay, Positive
from consilience.server.averaging.steps.adaptive import YogiStep


@recipe
def fedyogi(
    *,
    server_lr: Positive = 0.01,
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: Positive = 1e-3,
    **common: Unpack[Common],
) -> Algorithm:
    """Reddi et al. 2021: m <- beta1 m + (1 - beta1) d, v <- v - (1 - beta2) d^2 sign(v - d^2),
    w <- w + server_lr m / (sqrt(v) + tau).

    d = sum_k (N_k / N) (w_k - w). No bias correction; v starts at 0.

    Use when: as FedAdam, where the second moment should change slowly.
    Not when: plain averaging converges well: this adds settings to tune.
    """
    common.setdefault("step", YogiStep(lr=server_lr, beta1=beta1, beta2=beta2, tau=tau))
    return averaged(**common)
