"""FedFa: weights by accuracy and participation."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.reporting import ScoreAtEnd
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Probability
from consilience.server.averaging.weighting.fedfa import FedFaWeights


@recipe
def fedfa(*, gamma: Probability = 0.5, **common: Unpack[Common]) -> Algorithm:
    """Huang et al. 2022, as DUW prints it: gamma M_k + (1 - gamma) E_k from accuracy and participation.

    M_k ~ -log2(accuracy share), E_k ~ -log2(1 - participation share); accuracy is that of the trained model on the
    client's own training rows.

    Use when: a published comparison needs it.
    Not when: accurate clients should get more weight: the formula does the opposite of the paper's text.
    Cost: one more forward pass over the client's rows, two more numbers up.
    """
    # Text: accurate clients count more. Here: the printed formula, which does the opposite, as the authors' code does.
    common.setdefault("weighting", FedFaWeights(gamma=gamma))
    plain = averaged(**common)
    return replace(plain, client=ScoreAtEnd(training=plain.client))
