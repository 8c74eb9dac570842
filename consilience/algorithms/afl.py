"""AFL: minimises the loss of the worst client mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.reporting import LossAtStart
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Positive
from consilience.server.averaging.weighting.by_loss import AgnosticWeights


@recipe
def afl(*, lambda_lr: Positive = 0.1, **common: Unpack[Common]) -> Algorithm:
    """Mohri et al. 2019: min_w max_lambda sum_k lambda_k F_k(w), lambda on the simplex, by w <- sum_k lambda_k w_k and
    lambda <- projection of lambda + lambda_lr F(w).

    lambda starts uniform; F_k is client k's loss at the model it was sent.

    Use when: the model must work for every client, and the mixture of clients in later use is unknown.
    Not when: clients are many or noisy: the one with the largest loss then dominates.
    """
    # Paper: one stochastic gradient step of w a round. Here: local training, which is that step with one full batch.
    common.setdefault("weighting", AgnosticWeights(step_size=lambda_lr))
    plain = averaged(**common)
    return replace(plain, client=LossAtStart(training=plain.client))
