"""FedDM: the server trains on clients' synthetic rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from consilience.algorithms._common import Common, averaged, recipe
from consilience.client.condensed_rows import Start
from consilience.client.distribution_matching import DistributionMatching
from consilience.client.local_training import LocalTraining
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.settings import Count, Invalid, NonNegative, Positive
from consilience.server.rules.synthetic_training import SyntheticTraining


@recipe
def feddm(
    *,
    per_class: Count = 10,
    shape: tuple[Count, ...] | None = None,
    start: Start = "noise",
    radius: NonNegative = 5.0,
    server_steps: Count = 200,
    server_lr: Positive = 0.02,
    server_batch_size: Count = 256,
    **common: Unpack[Common],
) -> Algorithm:
    """Xiong et al. 2023: client k learns `per_class` rows a class that match its class means under models near w^t.

    min_s sum_c |mean f(x_c; w') - mean f(s_c; w')|^2 with |w' - w^t| <= radius; the server then trains w on all s, and
    stays within the radius, too (0: clients use w^t alone, and the server is not bounded).
    `lr`, `optimiser`, `epochs` and `batch_size` are those of the synthetic rows; models whose first
    layer is not dense need `shape`. Traffic up: rows instead of a model.

    Use when: communication rounds are expensive, and sending small synthetic sets is acceptable.
    Not when: synthetic rows may reveal too much, or inputs are not images or feature vectors.
    """
    # Paper: w' Gaussian around w^t, cut off at the radius; SGD of rate 1 on the rows. Here: w' in a uniform direction
    # at a uniform distance, so that models of any size get near and far ones alike; Adam, because the right rate of SGD
    # depends on the size of the features (accuracy on `digits`, Dirichlet 0.05, five rounds, one seed: 0.38 at rate 1,
    # 0.69 at 0.3, 0.82 at 0.1; Adam 0.83).
    if common.get("channel", Plain()) != Plain():
        raise Invalid(f"feddm.channel = {common.get('channel')!r} cannot be used: channels carry models, not rows")
    common.setdefault("optimiser", "adam")
    common.setdefault("lr", 0.05)
    common.setdefault("epochs", 50)
    common.setdefault("batch_size", 256)
    algorithm = averaged(**common)
    assert isinstance(algorithm.client, LocalTraining)
    client = DistributionMatching(
        per_class=per_class,
        shape=shape,
        start=start,
        radius=radius,
        solver=algorithm.client.solver,
        work=algorithm.client.work,
    )
    limit = radius if radius else None
    server = SyntheticTraining(steps=server_steps, lr=server_lr, batch_size=server_batch_size, radius=limit)
    return replace(algorithm, client=client, server=server)
