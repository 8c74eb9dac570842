"""Lower baseline: local training without exchange."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.local_only import LocalOnly
from consilience.client.local_training import LocalTraining
from consilience.core.algorithm import Algorithm
from consilience.server.rules.no_server import NoServer


@recipe
def local_only(**common: Unpack[Common]) -> Algorithm:
    """No paper: w_k <- local training from w_k, and nothing is shared.

    The server's model stays the initial one: evaluate the clients' personal models. A round is as much work as in any
    other algorithm, so that curves can be compared; only the losses are sent.

    Use when: you need a lower baseline: what each client reaches on its own data.
    Not when: one model for all is wanted.
    """
    usual = averaged(**common)
    assert isinstance(usual.client, LocalTraining)
    training = replace(usual.client, personal_layers=None)  # nothing is sent, so the whole model is the client's own
    return Algorithm(selection=usual.selection, client=LocalOnly(training=training), server=NoServer())
