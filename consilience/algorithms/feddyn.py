"""FedDyn: dynamic regularisation of local losses."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe, with_terms
from consilience.client.memory.corrections import Gradient
from consilience.client.terms.linear import Linear
from consilience.client.terms.proximal import Proximal
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Positive
from consilience.server.averaging.ledgers.drift import MeanDrift
from consilience.server.averaging.weighting.by_size import UniformWeights


@recipe
def feddyn(*, alpha: Positive = 0.1, **common: Unpack[Common]) -> Algorithm:
    """Acar et al. 2021: clients minimise F_k(w) - <g_k, w> + alpha/2 |w - w^t|^2, then g_k <- g_k - alpha (w_k - w^t).

    The server keeps h <- h - alpha (1/N) sum_S (w_k - w^t) over all N clients and sets w = mean_S w_k - h / alpha.
    FedAvg's traffic; clients keep one model.

    Use when: you need the minimiser of the global loss despite many local steps.
    Not when: few clients take part: the stored gradients are then stale, and it can diverge.
    """
    common.setdefault("weighting", UniformWeights())
    terms = (Linear(remembered="gradient"), Proximal(mu=alpha))
    return with_terms(averaged(**common), *terms, memory=(Gradient(alpha=alpha),), ledgers=(MeanDrift(),))
