"""FedProx: a leash on local training."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, with_terms
from consilience.client.terms.proximal import Proximal
from consilience.core.algorithm import Algorithm
from consilience.core.checks import NonNegative


def fedprox(*, mu: NonNegative = 0.1, **common: Unpack[Common]) -> Algorithm:
    """Li et al. 2020: clients minimise F_k(w) + mu/2 |w - w_global|^2, as many steps as each can afford."""
    # Paper: clients sampled with probability N_k/N, then a plain mean. Here: uniform sampling and a mean weighted by
    # N_k, because the authors' own code does so, to be comparable with FedAvg.
    return with_terms(averaged(**common), Proximal(mu=mu))
