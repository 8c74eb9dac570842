"""FedProx:FedSplit: FedSplit with inexact local steps."""

from __future__ import annotations

from typing import Literal, Unpack

from consilience.algorithms._common import recipe
from consilience.algorithms._splitting import Local, splitting
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Fraction, Positive
from consilience.server.protocols import Weighting


@recipe
def fedprox_fedsplit(
    *,
    step: Positive,
    weights: Literal["uniform", "examples"] | tuple[Positive, ...] = "uniform",
    keeps_z: bool = False,
    relaxation: Fraction = 1.0,
    weighting: Weighting | None = None,
    **local: Unpack[Local],
) -> Algorithm:
    """Mathew & Asha 2024: device j takes the steps it can towards min F_j(w) + mu/2 |w - (2x - z_j)|^2, mu = 1/step.

    Then z_j <- z_j + 2 (w_j - x), and x is the mean of every device's z_j. Minibatches, and as many local steps as
    the environment gives each device, as in FedProx. The other options are those of `fedsplit`.

    Use when: losses are nearly convex, clients differ much and do unequal work, and most of them take part.
    Not when: few of many clients take part, or networks are deep: it was worse than FedAvg on LSTMs.
    Cost: FedAvg's traffic; each client keeps a model (with `keeps_z` the server does, and sends it).
    """
    # Paper: does not say where the solver starts. Here: at x, because then the true minimiser is a fixed point however
    # few steps are taken; from 2x - z_j it is not.
    return splitting(step=step, weights=weights, keeps_z=keeps_z, relaxation=relaxation, weighting=weighting, **local)
