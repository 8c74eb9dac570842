"""FedProx: a proximal term in local training."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe, with_terms
from consilience.client.inexactness import ReportsGamma
from consilience.client.terms.proximal import Proximal
from consilience.core.algorithm import Algorithm
from consilience.core.settings import NonNegative


@recipe
def fedprox(*, mu: NonNegative = 0.1, report_gamma: bool = False, **common: Unpack[Common]) -> Algorithm:
    """Li et al. 2020: clients minimise F_k(w) + mu/2 |w - w_global|^2, as many steps as each can afford.

    With `report_gamma` each reply has the inexactness gamma = |grad h_k(w_k)| / |grad h_k(w_global)|, where h_k is this
    objective; it costs each client two gradients over all its rows.

    Use when: clients do many local steps, or unequal numbers of them.
    Not when: the exact optimum matters: the limit is biased where clients differ; a large mu slows all clients.
    Cost: FedAvg's.
    """
    # Paper: clients sampled with probability N_k/N, then a plain mean. Here: uniform sampling and a mean weighted by
    # N_k, because the authors' own code does so, to be comparable with FedAvg.
    algorithm = with_terms(averaged(**common), Proximal(mu=mu))
    return replace(algorithm, client=ReportsGamma(training=algorithm.client, mu=mu)) if report_gamma else algorithm
