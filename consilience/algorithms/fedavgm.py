"""FedAvgM: momentum at the server."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Decay, Positive
from consilience.server.averaging.steps.plain import MomentumStep


@recipe
def fedavgm(*, server_lr: Positive = 1.0, beta: Decay = 0.9, **common: Unpack[Common]) -> Algorithm:
    """Hsu et al. 2019: v <- beta v + d, w <- w + server_lr v, where d = sum_k (N_k / N) (w_k - w).

    With `beta = 0` and `server_lr = 1` it is `fedavg`.

    Use when: updates vary from round to round, as with few, heterogeneous clients a round.
    Not when: all clients take part and the updates are already stable.
    """
    common.setdefault("step", MomentumStep(lr=server_lr, beta=beta))
    return averaged(**common)
