"""FedNova: updates normalised by local steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.local_training import LocalTraining
from consilience.client.solver_wrappers import Scheduled
from consilience.client.solvers import SGD
from consilience.client.terms.proximal import Proximal
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Invalid
from consilience.server.averaging.averaging import Averaging
from consilience.server.rules.normalised_averaging import NormalisedAveraging


@recipe
def fednova(**common: Unpack[Common]) -> Algorithm:
    """Wang et al. 2020: w <- w - tau_eff sum_k (N_k / N) (w - w_k) / tau_k, tau_eff = sum_k (N_k / N) tau_k.

    Local training is ordinary; with momentum or FedProx's term, tau_k is the sum of the client's step coefficients.

    Use when: clients do unequal numbers of steps, which would bias FedAvg's objective.
    Not when: all do the same number of steps: it then equals FedAvg.
    Cost: FedAvg's.
    """
    plain = averaged(**common)
    client, server = plain.client, plain.server
    assert isinstance(client, LocalTraining) and isinstance(server, Averaging)
    solver, proximal = client.solver, [term for term in client.terms if isinstance(term, Proximal)]
    if isinstance(solver, Scheduled) and solver.steps is None and not proximal:
        solver = solver.solver  # the same rate for all steps of a round, in which |a_k| is measured
    if not isinstance(solver, SGD) or solver.nesterov or len(proximal) < len(client.terms):
        raise Invalid(
            "fednova needs optimiser = 'sgd' and no terms but 'proximal': it must know how steps add up. Clipping, "
            "accumulation and schedules within a round change that; so does lr_schedule together with 'proximal'"
        )
    if client.personal_layers is not None:
        raise Invalid("fednova.personal_layers cannot be used: its server rescales whole models")
    shrink = solver.lr * sum(term.mu for term in proximal)
    return replace(
        plain, server=NormalisedAveraging(weighting=server.weighting, momentum=solver.momentum, shrink=shrink)
    )
