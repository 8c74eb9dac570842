"""Shared code of the recipes for low-rank adapters."""

from __future__ import annotations

from dataclasses import replace

from consilience.client.adapter_training import AdapterTraining
from consilience.client.local_training import LocalTraining
from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import HasFeedback, capability
from consilience.core.settings import Count, Invalid
from consilience.layers.adapters import Factors
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.steps.plain import Replace
from consilience.server.rules.ranked_adapters import RankedAdapters

Ranks = tuple[Count, ...]


def adapted(
    algorithm: Algorithm,
    factors: Factors,
    *,
    ranks: Ranks | None = None,
    freeze_a: bool = False,
    merges: bool = False,
) -> Algorithm:
    """The algorithm for a model with adapters, which clients may have at different ranks."""
    client = AdapterTraining(training=algorithm.client, factors=factors, freeze_a=freeze_a, merges=merges)
    if ranks is None:
        return replace(algorithm, client=client)
    if not ranks:
        raise Invalid("ranks is empty: give the ranks of the clients, or leave it out")
    return replace(
        algorithm, client=client, server=RankedAdapters(server=algorithm.server, ranks=ranks, factors=factors)
    )


def refuse_what_follows_factors(algorithm: Algorithm, why: str, *, steps: bool) -> None:
    """Refuse memories, ledgers, channels and (`steps`) server steps that track entries of A and B over rounds."""
    client, server = algorithm.client, algorithm.server
    assert isinstance(client, LocalTraining) and isinstance(server, Averaging)
    following: list[tuple[str, object]] = [("memory", part) for part in client.memory]
    following += [("ledgers", part) for part in server.ledgers]
    feedback = capability(algorithm.channel, HasFeedback)
    if feedback is not None and feedback.feedback:
        following.append(("channel", algorithm.channel))
    if steps and not isinstance(server.step, Replace):
        following.append(("step", server.step))
    for option, part in following:
        raise Invalid(
            f"{option} = {type(part).__name__} follows the numbers of the model from round to round, but {why}: use "
            "fedit or ffa_lora"
        )
