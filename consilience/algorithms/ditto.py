"""Ditto: personal models kept near the global one."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.local_training import LocalTraining
from consilience.client.personal_training import PersonalTraining
from consilience.client.terms.proximal import Proximal
from consilience.core.algorithm import Algorithm
from consilience.core.settings import NonNegative


@recipe
def ditto(*, lam: NonNegative = 0.1, **common: Unpack[Common]) -> Algorithm:
    """Li et al. 2021: beside FedAvg's model w, each client k trains its own v_k on F_k(v) + lam/2 |v - w^t|^2.

    v_k never leaves the client and does not affect w. FedAvg's traffic, twice its computation; clients keep a model.
    Terms, memory and personal layers act on w.

    Use when: every client needs its own model, kept close to the global one.
    Not when: clients have too few rows to train twice, or one model must serve all.
    """
    # Paper: the personal solver may take other steps and another rate than the global one. Here: the same batches and
    # the same rate, so that a round is one pass over the data.
    algorithm = averaged(**common)
    shared = algorithm.client
    assert isinstance(shared, LocalTraining)
    own = replace(shared, terms=(Proximal(mu=lam),), memory=(), personal_layers=None)
    return replace(algorithm, client=PersonalTraining(shared=shared, own=own))
