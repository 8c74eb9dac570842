"""DUW-FedAvg: FedAvg with aggregation weights that were learned for every round and client."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.server.averaging.weighting.schedule import ScheduleWeights


@recipe
def duw_fedavg(*, schedule: str = "", **common: Unpack[Common]) -> Algorithm:
    """Nakai-Kasai and Wadayama 2022: w <- sum_k Theta[t, k] w_k, Theta learned by deep unfolding.

    `schedule` is the file that `consilience learn` or `learn_schedule` wrote; without one the algorithm can be learned
    for, but not run. `weighting=ScheduleWeights(table=...)` gives the weights themselves.

    Use when: the same clients train again and again, so that learning the weights pays, and differ in labels, speed or
    reliability.
    Not when: clients are many, change or come once; the weights belong to one start model and number of rounds.
    Cost: hundreds of whole runs to learn the weights; then FedAvg's.
    """
    common.setdefault("weighting", ScheduleWeights(path=schedule))
    return averaged(**common)
