"""A server without data knows what replies must look like: the template is that of what clients really send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from declared import build, model_of

from consilience import algorithms
from consilience.channel import Chain, Quantise, RandomK, TopK
from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.rounds import run
from consilience.flower.engine.templates import reply_template
from consilience.wire.template import Template

pytestmark = pytest.mark.usefixtures("untraced")


class Spy:
    """An engine that keeps what it was asked and what it answered."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.calls = engine, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def exchange(self, client: Any, channel: Any, broadcast: Broadcast, ids: np.ndarray, **when: int) -> Cohort:
        cohort = self._engine.exchange(client, channel, broadcast, ids, **when)
        self.calls.append((client, channel, broadcast, cohort))
        return cohort


def assert_foreseen(spy: Spy) -> None:
    assert spy.calls
    for client, channel, broadcast, cohort in spy.calls:
        foreseen = reply_template(client, channel, spy.task, broadcast, dtype=torch.float64)
        for row in range(len(cohort)):
            sent = tree.rows(cohort.reply, row)
            assert Template.of(sent) == foreseen
            assert list(foreseen.leaves) == list(Template.of(sent).leaves)  # the order in which the server adds up
            assert tiny.same(foreseen.check(sent), sent)
            assert foreseen.nbytes == tree.nbytes(sent)


@pytest.mark.parametrize("name", algorithms.names())
def test_replies_are_as_foreseen(name: str) -> None:
    """In every exchange of two rounds, looks at the data before and after training included."""
    spy = Spy(tiny.engine(model_of(name, "convnet")))
    list(run(build(name), spy, rounds=2))
    assert_foreseen(spy)


@pytest.mark.parametrize(
    "channel",
    [
        TopK(fraction=0.1),
        RandomK(fraction=0.1),
        Quantise(bits=4),
        Chain(channels=(TopK(fraction=0.2), Quantise(bits=8))),
    ],
    ids=lambda channel: type(channel).__name__,
)
def test_encoded_replies_are_as_foreseen(channel: Any) -> None:
    spy = Spy(tiny.engine(tiny.convnet))
    list(run(build("scaffold", channel=channel), spy, rounds=2))
    assert_foreseen(spy)
