"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe, with_terms
from consilience.client.memory.corrections import ControlVariate
from consilience.client.terms.linear import Linear
from consilience.core.algorithm import Algorithm
from consilience.server.averaging.ledgers.drift import ControlVariates
from consilience.server.averaging.weighting.by_size import UniformWeights


@recipe
def scaffold(**common: Unpack[Common]) -> Algorithm:
    """Karimireddy et al. 2020, option II: y_i <- y_i - eta (g_i(y_i) - c_i + c), that is F_i(w) + <c - c_i, w>.

    After K steps c_i <- c_i - c + (x - y_i) / (K eta); the server takes the plain mean of the y_i and moves c by
    |S|/N times the mean change of the c_i. Twice FedAvg's traffic each way; clients keep one model. Plain SGD only.

    Use when: clients are heterogeneous, do many local steps and take part often.
    Not when: participation is rare, or twice the traffic is too much.
    """
    common.setdefault("weighting", UniformWeights())
    term = Linear(received="control_variate", remembered="control_variate")
    return with_terms(averaged(**common), term, memory=(ControlVariate(),), ledgers=(ControlVariates(),))
