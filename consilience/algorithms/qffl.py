"""q-FFL: more even accuracy over clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.reporting import LossAtStart
from consilience.core.algorithm import Algorithm
from consilience.core.settings import NonNegative, Positive
from consilience.server.averaging.ledgers.qffl_step import QfflStep
from consilience.server.averaging.weighting.by_loss import QfflWeights


@recipe
def qffl(*, q: NonNegative = 1.0, lipschitz: Positive | None = None, **common: Unpack[Common]) -> Algorithm:
    """Li et al. 2020 (q-FedAvg): w <- w - sum_k Delta_k / sum_k h_k, Delta_k = F_k^q L (w - w_k),
    h_k = q F_k^(q-1) |L (w - w_k)|^2 + L F_k^q, where F_k is client k's loss at w and L = 1 / lr.

    With q = 0 it is FedAvg with equal weights; `lipschitz` sets another L.

    Use when: accuracy should be even over clients, at some cost in the mean.
    Not when: only the mean matters, or clients' losses are not comparable.
    """
    # Paper: clients are drawn with probability N_k / N. Here: by `selection`, which is uniform or all, and clients
    # count the same, so that the objective is sum_k F_k^(q+1) / (q + 1).
    given = common.get("ledgers", ())
    optimiser = common.get("optimiser", "sgd")
    rate = getattr(optimiser, "lr", common.get("lr", 0.01))  # a solver brings its own
    constant = lipschitz or 1 / rate
    options: Common = {"weighting": QfflWeights(q=q), **common}
    options["ledgers"] = (*given, QfflStep(q=q, lipschitz=constant))
    plain = averaged(**options)
    return replace(plain, client=LossAtStart(training=plain.client))
