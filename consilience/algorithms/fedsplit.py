"""FedSplit: operator splitting, exact fixed point."""

from __future__ import annotations

from typing import Literal, Unpack

from consilience.algorithms._common import recipe
from consilience.algorithms._splitting import Local, splitting
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Fraction, Positive
from consilience.server.protocols import Weighting


@recipe
def fedsplit(
    *,
    step: Positive,
    weights: Literal["uniform", "examples"] | tuple[Positive, ...] = "uniform",
    keeps_z: bool = False,
    relaxation: Fraction = 1.0,
    weighting: Weighting | None = None,
    **local: Unpack[Local],
) -> Algorithm:
    """Pathak & Wainwright 2020: z_j <- z_j + 2 (prox_{step F_j}(2x - z_j) - x), then x = mean of every client's z_j.

    The prox is approximated by full-batch gradient steps from x, ten unless `epochs` is given; with enough of them it
    is exact. `weights="examples"` minimises sum N_j F_j instead of sum F_j, a list of numbers p_j sum p_j F_j.
    `keeps_z`: the server keeps every z_j and sends each client its own; otherwise clients keep them. `relaxation` below
    1 shortens the step of z_j, which helps where losses are not convex; a `weighting` such as simprox scales it for
    each client by its weight over the largest weight. Both leave the fixed point unchanged.

    Use when: losses are convex, clients differ much, and most of them take part: the limit is the true minimiser.
    Not when: few of many clients take part (x is a mean over all of them and moves slowly), or networks are deep.
    Cost: FedAvg's traffic; each client keeps a model (with `keeps_z` the server does, and sends it).
    """
    local.setdefault("batch_size", None)
    local.setdefault("epochs", 10)
    # Paper: the server loops over all z_j. Here: those that do not take part keep theirs, and count in the mean,
    # because the mean over the participants alone does not converge.
    return splitting(step=step, weights=weights, keeps_z=keeps_z, relaxation=relaxation, weighting=weighting, **local)
