"""FedSiam-DA: siamese training, dual aggregation."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.local_training import LocalTraining
from consilience.client.memory.models import PreviousModel
from consilience.client.training_variant import Siamese
from consilience.core.algorithm import Algorithm
from consilience.core.settings import NonNegative
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.weighting.dual import DualWeights
from consilience.server.protocols import read_by
from consilience.server.rules.dual_averaging import LayerwiseDual


@recipe
def fedsiam_da(
    *,
    mu: NonNegative = 0.1,
    freeze_global: bool = False,
    history: Literal["epoch", "round"] = "epoch",
    sequential: bool = False,
    stop_gradient: bool = True,
    predictor: bool = True,
    compare_on: Literal["weights", "updates"] = "weights",
    first_stage: Literal["uniform", "examples"] = "uniform",
    per_layer: bool = False,
    **common: Unpack[Common],
) -> Algorithm:
    """Yang et al. 2022: F_k(w) + mu (cos(z_past, z) - cos(p', sg z)/2 - cos(p, sg z')/2), then xi_k ~ cos(w_k, mean).

    The server averages twice: the plain mean f, then sum_k xi_k w_k with xi_k = cos(w_k, f) / sum_j cos(w_j, f). These
    weights are nearly uniform; compare_on = "updates" compares updates, which differ more. Needs a model with
    projection and prediction heads, such as model.name = "siamese"; `weighting` replaces the dual aggregation.
    Ablations: without `stop_gradient` (sg is the identity), without `predictor` (p = z); both off with `freeze_global`
    is the paper's eq 5 at twice this mu.

    Use when: representations drift apart and the model can have projection and prediction heads.
    Not when: compute is limited: each step runs three networks; in our runs it did not beat FedAvg.
    """
    dual = DualWeights(compare_on=compare_on, first_stage=first_stage)
    weighting, memory = common.setdefault("weighting", dual), common.get("memory", ())
    if "previous" not in [part.name for part in memory]:
        wanted = "moved" in read_by(weighting)
        common["memory"] = (*memory, PreviousModel(report=wanted))
    algorithm = averaged(**common)
    client, server = algorithm.client, algorithm.server
    assert isinstance(client, LocalTraining) and isinstance(server, Averaging)
    siamese = Siamese(
        mu=mu,
        freeze_global=freeze_global,
        history=history,
        sequential=sequential,
        stop_gradient=stop_gradient,
        predictor=predictor,
    )
    layered = LayerwiseDual(compare_on=compare_on, first_stage=first_stage, step=server.step)
    return replace(algorithm, client=siamese.applied_to(client), server=layered if per_layer else server)
