"""FedDF: ensemble distillation on unlabelled rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Count, Invalid, Positive
from consilience.server.averaging.averaging import Averaging
from consilience.server.rules.ensemble_distillation import EnsembleDistillation
from consilience.server.rules.public_rows import PublicRows


@recipe
def feddf(
    *,
    public: PublicRows,
    server_steps: Count = 500,
    server_lr: Positive = 1e-3,
    server_batch_size: Count = 128,
    **common: Unpack[Common],
) -> Algorithm:
    """Lin et al. 2020: w = average of the w_k, then min_w mean_x KL(softmax(mean_k f(x; w_k)) || softmax(f(x; w))).

    x are the server's `public` rows, without labels: file_rows (an .npy file), given_rows (a tensor, from Python) or
    noise_rows. Classification only.

    Use when: labels are skewed and the server has unlabelled rows that look like the clients'.
    Not when: the server has no such rows, or may not see individual models.
    Cost: FedAvg's for clients; the server passes all public rows through every model, and trains `server_steps` steps.
    """
    # Paper: up to 10,000 steps, stopped early by a validation set; clients of several architectures; 1-bit networks.
    # Here: a fixed number of steps, since the server has no labelled rows; one architecture.
    if common.get("personal_layers") is not None:
        raise Invalid("personal_layers is incompatible with feddf: the server must be able to run every client's model")
    algorithm = averaged(**common)
    assert isinstance(algorithm.server, Averaging)
    server = EnsembleDistillation(
        averaging=algorithm.server, public=public, steps=server_steps, lr=server_lr, batch_size=server_batch_size
    )
    return replace(algorithm, server=server)
