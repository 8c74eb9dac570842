"""The few things a client can be asked to do, by names that both sides know: rules themselves never travel."""

from __future__ import annotations

from typing import NamedTuple

from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import (
    PersonalRule,
    PostTrainingPass,
    PreTrainingPass,
    QueriesBeforeSelection,
    capability,
)
from consilience.core.evaluate import Evaluate, LossQuery
from consilience.core.protocols import Channel, ClientRule
from consilience.core.settings import Invalid

TRAIN, PRE_TRAINING, TEST, TEST_OWN = "train", "pre_training", "test", "test_own_model"
TESTS = (TEST, TEST_OWN)  # sums of the metrics of a model on a client's test rows


class Asked(NamedTuple):
    """A rule and the channel its replies go through."""

    rule: ClientRule
    channel: Channel


def rules_of(algorithm: Algorithm) -> dict[str, Asked]:
    """What the clients of an algorithm may be asked to do."""
    client, plain = algorithm.client, Plain()
    known = {
        TRAIN: Asked(client, algorithm.channel),
        TEST: Asked(Evaluate(), plain),
    }
    before, after = capability(client, PreTrainingPass), capability(client, PostTrainingPass)
    own = capability(client, PersonalRule)
    if capability(algorithm.selection, QueriesBeforeSelection) is not None:
        known["loss"] = Asked(LossQuery(), plain)
    if before is not None:
        known[PRE_TRAINING] = Asked(before.pre_training, plain)
    if after is not None:
        known["post_training"] = Asked(after.post_training, plain)
    if own is not None:
        known[TEST_OWN] = Asked(Evaluate(rule=own), plain)
    return known


def name_of(known: dict[str, Asked], rule: ClientRule, channel: Channel) -> str:
    """What a rule is called on both sides."""
    for name, asked in known.items():
        if asked.rule == rule and asked.channel == channel:
            return name
    raise Invalid(f"{type(rule).__name__} is not a rule of the algorithm that clients were deployed with")
