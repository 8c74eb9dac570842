"""Buffered SimProx: asynchronous SimProx weights."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._buffered import buffered
from consilience.algorithms._common import Common, recipe
from consilience.algorithms.simprox import simprox
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, Positive, Probability
from consilience.selection.everyone import Everyone
from consilience.server.rules.staleness import PolynomialStaleness, Staleness


@recipe
def simprox_buffered(
    *,
    buffer: Count = 10,
    concurrency: Count | None = None,
    staleness: Staleness | None = None,
    lambda_0: Probability = 0.7,
    tau: Positive = 0.5,
    softmax: bool = True,
    **common: Unpack[Common],
) -> Algorithm:
    """El-Niss et al. 2024 with Nguyen et al. 2022: w <- w + sum_k alpha_k s(tau_k) (w_k - w_sent,k), alpha by SimProx.

    Similarities and distances are those of the whole updates, added to the current model; s = (1 + tau)^-1/2 then
    scales stale ones down. SimProx's other options belong to `weighting`.

    Use when: clients differ in speed and some may diverge.
    Not when: the server may not see individual replies, or updates are so small that all weights are nearly equal.
    Cost: the server compares all pairs of the buffer, O(K^2 P).
    """
    # Paper: leaves asynchronous SimProx to future work. Here: its weights in FedBuff's buffer, over all idle clients.
    common.setdefault("selection", Everyone())
    old = staleness or PolynomialStaleness(power=0.5)
    weighted = simprox(lambda_0=lambda_0, tau=tau, softmax=softmax, **common)
    return buffered(weighted, buffer=buffer, concurrency=concurrency, staleness=old)
