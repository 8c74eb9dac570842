"""FedMA: matches hidden units before averaging."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.chain_training import ChainTraining
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, Invalid
from consilience.server.averaging.averaging import Averaging
from consilience.server.rules.matched_averaging import MatchedAveraging


@recipe
def fedma(*, passes: Count = 5, **common: Unpack[Common]) -> Algorithm:
    """Wang et al. 2020: w = sum_k p_k P_k w_k, the P_k orders of hidden units with least sum_k p_k |P_k w_k - w|^2.

    Layer by layer, by the Hungarian method (needs scipy), on chains of dense and convolutional layers with batch norm;
    other networks are refused.

    Use when: clients' hidden units differ in order: models that were trained separately, or many local steps.
    Not when: rounds are short: units then keep their order, and the result is FedAvg's at a higher cost.
    Cost: FedAvg's traffic; the server solves an assignment problem for each client and hidden layer, O(units^3).
    """
    # Paper: a Bayesian model that can add units, so that the global model may outgrow the clients'; one round for each
    # layer, in which the layers below are frozen and those above trained on; LSTMs too. Here: as many units as clients
    # have, since they keep one architecture; all layers in one round, since a round is one exchange; no LSTMs.
    if common.get("personal_layers") is not None:
        raise Invalid("personal_layers is incompatible with fedma: the server must see every layer to match its units")
    algorithm = averaged(**common)
    server = algorithm.server
    assert isinstance(server, Averaging)
    return replace(
        algorithm,
        client=ChainTraining(training=algorithm.client),
        server=MatchedAveraging(weighting=server.weighting, passes=passes),
    )
