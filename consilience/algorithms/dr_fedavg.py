"""DR-FedAvg: more weight for clients with large loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.reporting import LossAtStart
from consilience.core.algorithm import Algorithm
from consilience.core.settings import NonNegative
from consilience.server.averaging.weighting.by_loss import DrWeights


@recipe
def dr_fedavg(*, q: NonNegative = 1.0, **common: Unpack[Common]) -> Algorithm:
    """Zhao and Joshi 2022: weights ~ N_k loss_k^(q+1), where loss_k is client k's mean loss at the broadcast model.

    Use when: clients with large losses should improve, at the expense of the others.
    Not when: losses differ because some clients' data are noisy.
    Cost: one more forward pass over the client's rows, one more number up.
    """
    # Authors' code of DUW: the sum of minibatch losses during training. Here: eq (12) as printed, at the model w^(t).
    common.setdefault("weighting", DrWeights(q=q))
    plain = averaged(**common)
    return replace(plain, client=LossAtStart(training=plain.client))
