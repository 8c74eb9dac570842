"""The agreement of server and nodes: digests of what must be equal on both sides, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import (
    PersonalRule,
    PostTrainingPass,
    PreTrainingPass,
    QueriesBeforeSelection,
    capability,
)
from consilience.core.evaluate import VALIDATION, Evaluate, LossQuery
from consilience.core.protocols import Channel, ClientRule
from consilience.core.refusal import plain
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.flower.secure.terms import SecureTerms


def agreement(
    algorithm: Algorithm, task: Task, dtype: str, clients: int, secure: SecureTerms | None = None
) -> dict[str, str]:
    """Digests of the algorithm with all its settings, the model's tensors, the kind of task, secure sums.

    Frozen weights are never sent: each side loads its own, and their digests must be equal.
    """
    start = tree.flatten(task.start())
    shapes = [(path, tuple(leaf.shape), str(leaf.dtype)) for path, leaf in sorted(start.items())]
    return {
        "algorithm": _short(algorithm.spelled()),
        "model": _short(repr(shapes)),
        "frozen_weights": task.frozen_digest[:16] or "none",
        "kind": task.kind.name,
        "loss": task.loss_name,
        "metrics": " ".join(metric.key for metric in task.metrics.metrics),
        "dtype": dtype,
        "clients": str(clients),
        "secure_aggregation": "no" if secure is None else _short(repr(secure)),
    }


def differences(ours: Mapping[str, str], theirs: Any) -> str:
    """The differences, in words; empty if there are none."""
    if not isinstance(theirs, Mapping):
        return "everything"
    differing = [
        f"{key} ({plain(theirs.get(key), most=40)}, here {ours[key]})" for key in ours if ours[key] != theirs.get(key)
    ]
    return ", ".join(differing)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


TRAIN, PRE_TRAINING, TEST, TEST_OWN, VALIDATE = "train", "pre_training", "test", "test_own_model", "validate"
TESTS = (TEST, TEST_OWN, VALIDATE)  # sums of the metrics of a model on rows that a client does not train on


class RuleAndChannel(NamedTuple):
    """A rule and the channel its replies go through."""

    rule: ClientRule
    channel: Channel


def rules_of(algorithm: Algorithm) -> dict[str, RuleAndChannel]:
    """The rules that the clients of an algorithm may be asked to run, by name."""
    client, plain = algorithm.client, Plain()
    known = {
        TRAIN: RuleAndChannel(client, algorithm.channel),
        TEST: RuleAndChannel(Evaluate(), plain),
        VALIDATE: RuleAndChannel(Evaluate(work=VALIDATION), plain),
    }
    before, after = capability(client, PreTrainingPass), capability(client, PostTrainingPass)
    own = capability(client, PersonalRule)
    if capability(algorithm.selection, QueriesBeforeSelection) is not None:
        known["loss"] = RuleAndChannel(LossQuery(), plain)
    if before is not None:
        known[PRE_TRAINING] = RuleAndChannel(before.pre_training, plain)
    if after is not None:
        known["post_training"] = RuleAndChannel(after.post_training, plain)
    if own is not None:
        known[TEST_OWN] = RuleAndChannel(Evaluate(rule=own), plain)
    return known


def name_of(known: dict[str, RuleAndChannel], rule: ClientRule, channel: Channel) -> str:
    """The name of a rule on both sides."""
    for name, asked in known.items():
        if asked.rule == rule and asked.channel == channel:
            return name
    raise Invalid(f"{type(rule).__name__} is not a rule of the algorithm that clients were deployed with")
