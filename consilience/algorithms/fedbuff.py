"""FedBuff: asynchronous mean of a buffer of updates."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._buffered import buffered
from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count
from consilience.server.averaging.weighting.by_size import UniformWeights
from consilience.server.rules.staleness import PolynomialStaleness, Staleness


@recipe
def fedbuff(
    *,
    buffer: Count = 10,
    concurrency: Count | None = None,
    staleness: Staleness | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """Nguyen et al. 2022: w <- w + 1/K sum_k s(tau_k) (w_k - w_sent,k) over a buffer of K replies, s = (1 + tau)^-1/2.

    `concurrency` clients train at any time (default: all that are selected). For the paper's server learning rate and
    momentum set `step` (`momentum`, `adam`).

    Use when: clients differ much in speed, and the server may see only sums of updates.
    Not when: clients are equally fast: then a synchronous round costs no more time and has no stale updates.
    """
    # Paper: a client may be in a buffer twice. Here: once, because its second turn would start from the same model.
    common.setdefault("weighting", UniformWeights())
    old = staleness or PolynomialStaleness(power=0.5)
    return buffered(averaged(**common), buffer=buffer, concurrency=concurrency, staleness=old)
