"""DUW-FedAvg: learned weights per round and client."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.label_counting import LabelCounting
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, Invalid
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.weighting.schedule import ScheduleWeights
from consilience.server.averaging.weighting.transferred import TransferredWeights


@recipe
def duw_fedavg(
    *, schedule: str = "", rule: str = "", rule_rounds: Count | None = None, **common: Unpack[Common]
) -> Algorithm:
    """Nakai-Kasai and Wadayama 2022: w <- sum_k Theta[t, k] w_k, Theta learned by deep unfolding.

    `schedule` is the file that `consilience learn` or `learn_schedule` wrote; without one weights can be learned, but
    the algorithm cannot run. `weighting=ScheduleWeights(table=...)` takes the weights themselves. `rule` is the file of
    a rule fitted to learned weights (`consilience learn --rule FILE`), for other clients; `rule_rounds` is the number
    of rounds over which its weights change (default: the number it was learned for).

    Use when: the same clients train repeatedly, so that learning the weights pays off, and differ in labels, speed or
    reliability.
    Not when: clients are many or change; the weights are learned for one initial model and number of rounds.
    Cost: hundreds of whole runs to learn the weights; then FedAvg's.
    """
    if not rule:
        common.setdefault("weighting", ScheduleWeights(path=schedule))
        return averaged(**common)
    if schedule:
        raise Invalid(f"schedule = {schedule!r} and rule = {rule!r} both say how replies are weighted: give one")
    weighting = TransferredWeights(path=rule, rounds=rule_rounds)
    plain = averaged(**common)  # without the weighting, which reads labels that only the client below counts
    assert isinstance(plain.server, Averaging)
    server = replace(plain.server, weighting=weighting)
    client = LabelCounting(training=plain.client) if "labels" in weighting.reads else plain.client
    return replace(plain, client=client, server=server)
