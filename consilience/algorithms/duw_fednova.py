"""DUW-FedNova: scaled local steps, learned weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.local_training import LocalTraining
from consilience.client.paced_training import PacedTraining
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Invalid
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.weighting.schedule import ScheduleWeights
from consilience.server.rules.paced_averaging import PacedAveraging


@recipe
def duw_fednova(*, schedule: str = "", **common: Unpack[Common]) -> Algorithm:
    """Nakai-Kasai and Wadayama 2022, Algorithm 5: steps lr (tau_eff / tau_k) g, then w <- sum_k Theta[t, k] w_k.

    This differs from FedNova (`fednova`), which rescales only the sum of the steps.

    Use when: as DUW-FedAvg, with clients that do unequal numbers of steps.
    Not when: clients cannot report their number of steps before a round.
    Cost: as DUW-FedAvg; each client sends one number before every round.
    """
    # Paper: the loop runs over tau = 0 .. tau_k, one step too many for eq (5). Here: tau_k steps.
    common.setdefault("weighting", ScheduleWeights(path=schedule))
    plain = averaged(**common)
    client, server = plain.client, plain.server
    assert isinstance(client, LocalTraining) and isinstance(server, Averaging)
    if client.terms:
        raise Invalid("duw_fednova.terms cannot be used: it scales plain SGD steps of the loss alone")
    paced = PacedAveraging(weighting=server.weighting, combine=server.combine, step=server.step)
    return replace(plain, client=PacedTraining(training=client), server=paced)
