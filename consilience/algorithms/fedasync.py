"""FedAsync: each reply updates the model at once."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._buffered import buffered
from consilience.algorithms._common import Common, averaged, recipe, with_terms
from consilience.client.terms.proximal import Proximal
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, Fraction, NonNegative
from consilience.server.rules.staleness import PolynomialStaleness, Staleness


@recipe
def fedasync(
    *,
    alpha: Fraction = 0.6,
    mu: NonNegative = 0.005,
    staleness: Staleness | None = None,
    buffer: Count = 1,
    concurrency: Count | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """Xie et al. 2019: w <- (1 - a) w + a w_k with a = alpha s(tau), one reply at a time; F_k(v) + mu/2 |v - w|^2.

    A round is one reply (`buffer` of them are averaged first). `concurrency` clients train at any time (default: all
    that are selected); s is `polynomial` with power 1/2, or `constant`, or `hinge`.

    Use when: clients differ much in speed, and waiting for the slowest would waste most of the time.
    Not when: one reply at a time is too noisy (few rows, strong skew), or the server may see only sums: use fedbuff.
    """
    proximal = with_terms(averaged(**common), Proximal(mu=mu)) if mu else averaged(**common)
    old = staleness or PolynomialStaleness(power=0.5)
    return buffered(proximal, buffer=buffer, concurrency=concurrency, staleness=old, rate=alpha, moves="model")
