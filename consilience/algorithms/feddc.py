"""FedDC: local drift, decoupled and corrected."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe, with_terms
from consilience.client.memory.corrections import ControlVariate, Drift
from consilience.client.terms.linear import DriftCorrected, Linear
from consilience.core.algorithm import Algorithm
from consilience.core.settings import NonNegative
from consilience.server.averaging.ledgers.drift import ControlVariates, MeanDrift
from consilience.server.averaging.weighting.by_size import UniformWeights


@recipe
def feddc(*, alpha: NonNegative = 0.1, **common: Unpack[Common]) -> Algorithm:
    """Gao et al. 2022: clients minimise F_i(w) + alpha/2 |h_i + w - w^t|^2 + <g - g_i, w>, then h_i <- h_i + w_i - w^t.

    g_i is the client's last mean gradient (its update over K eta) and g their mean, as in SCAFFOLD; the server sets
    w = mean_S w_i + mean h_i. Twice FedAvg's traffic each way; clients keep two models. Plain SGD only.

    Use when: clients drift over many local steps and take part often.
    Not when: participation is rare: the drift that clients store is then stale.
    """
    # Paper: the mean of w_i + h_i, weighted by examples. Here: the drifts of all clients, not of this round's alone,
    # and plain means, because the authors' code does so; with full participation and equal sizes it is the same.
    common.setdefault("weighting", UniformWeights())
    gradient = Linear(received="control_variate", remembered="control_variate")
    return with_terms(
        averaged(**common),
        DriftCorrected(alpha=alpha),
        gradient,
        memory=(Drift(), ControlVariate()),
        ledgers=(ControlVariates(), MeanDrift()),
    )
