"""FedAMP: personal models mixed by their similarity."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Unpack

from consilience.algorithms._common import Common, averaged, recipe, with_terms
from consilience.client.memory.models import TrainedModel
from consilience.client.terms.proximal import Proximal
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Invalid, NonNegative, Positive, Probability
from consilience.server.rules.message_passing import MessagePassing


@recipe
def fedamp(
    *,
    lam: NonNegative = 0.1,
    alpha: Positive = 1.0,
    sigma: Positive = 1.0,
    attention: Literal["distance", "cosine"] = "distance",
    own_share: Probability = 0.5,
    **common: Unpack[Common],
) -> Algorithm:
    """Huang et al. 2021: client k minimises F_k(w) + lam/(2 alpha) |w - u_k|^2 around a cloud model of its own.

    u_k = (1 - sum_{j != k} xi_kj) w_k + sum_{j != k} xi_kj w_j, xi_kj = alpha A'(|w_k - w_j|^2), A = 1 - exp(-x/sigma).
    attention = "cosine" is the paper's HeurFedAMP. FedAvg's traffic; the server keeps all K models.

    Use when: clients form unknown groups and should learn from similar clients.
    Not when: there are thousands of clients: the server keeps a model for each.
    """
    # Paper: does not say where the local solver starts. Here: at u_k, so that clients need no state to train from.
    if common.get("personal_layers") is not None:
        raise Invalid("fedamp.personal_layers cannot be used: the server compares and mixes whole models")
    algorithm = with_terms(averaged(**common), Proximal(mu=lam / alpha), memory=(TrainedModel(),))
    server = MessagePassing(attention=attention, alpha=alpha, sigma=sigma, own_share=own_share)
    return replace(algorithm, server=server)
