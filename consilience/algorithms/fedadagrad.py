"""FedAdagrad: Adagrad at the server."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Decay, Positive
from consilience.server.averaging.steps.adaptive import AdagradStep


@recipe
def fedadagrad(
    *, server_lr: Positive = 0.01, beta1: Decay = 0.0, tau: Positive = 1e-3, **common: Unpack[Common]
) -> Algorithm:
    """Reddi et al. 2021: m <- beta1 m + (1 - beta1) d, v <- v + d^2, w <- w + server_lr m / (sqrt(v) + tau).

    d = sum_k (N_k / N) (w_k - w). No bias correction; v starts at 0.

    Use when: gradients are sparse, as with rare words, and the server's learning rate is hard to set.
    Not when: runs are long: its step sizes only decrease.
    """
    common.setdefault("step", AdagradStep(lr=server_lr, beta1=beta1, tau=tau))
    return averaged(**common)
