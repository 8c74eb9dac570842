"""The few things a client can be asked to do, by names that both sides know: rules themselves never travel."""

from __future__ import annotations

from typing import NamedTuple

from consilience.core.algorithm import Algorithm, Plain
from consilience.core.evaluate import Evaluate, LossQuery
from consilience.core.protocols import (
    Channel,
    ClientRule,
    PersonalRule,
    PostTrainingPass,
    PreTrainingPass,
    QueriesBeforeSelection,
)
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
    if isinstance(algorithm.selection, QueriesBeforeSelection):
        known["loss"] = Asked(LossQuery(), plain)
    if isinstance(client, PreTrainingPass):
        known[PRE_TRAINING] = Asked(client.pre_training, plain)
    if isinstance(client, PostTrainingPass):
        known["post_training"] = Asked(client.post_training, plain)
    if isinstance(client, PersonalRule):
        known[TEST_OWN] = Asked(Evaluate(rule=client), plain)
    return known


def name_of(known: dict[str, Asked], rule: ClientRule, channel: Channel) -> str:
    """What a rule is called on both sides."""
    for name, asked in known.items():
        if asked.rule == rule and asked.channel == channel:
            return name
    raise Invalid(f"{type(rule).__name__} is not a rule of the algorithm that clients were deployed with")
