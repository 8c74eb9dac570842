"""DP-FedAvg: federated averaging that hides whether any one client took part."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import Solving, averaged, recipe
from consilience.client.terms.term import Term
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Fraction, Positive, Whole
from consilience.selection.poisson import Poisson
from consilience.server.averaging.averaging import Averaging
from consilience.server.protocols import Step
from consilience.server.rules.private_averaging import AdaptiveBound, PrivateAveraging


class Local(Solving, total=False):
    """What may be chosen freely: who takes part, and how much each counts, is part of the privacy proof."""

    terms: tuple[Term, ...]
    step: Step


@recipe
def dp_fedavg(
    *,
    bound: Positive = 1.0,
    noise: Positive = 1.0,
    rate: Fraction = 1.0,
    delta: Positive = 1e-5,
    epsilon: Positive | None = None,
    noise_seed: Whole | None = None,
    quantile: Fraction | None = None,
    bound_lr: Positive = 0.2,
    count_noise: Positive | None = None,
    **local: Unpack[Local],
) -> Algorithm:
    """McMahan et al. 2018: w <- w + (sum_k clip(w_k - w, bound) + N(0, (noise bound)^2)) / (rate K).

    Each of K clients takes part with probability `rate`. The models of all rounds together are (epsilon, delta)-private
    with respect to adding or removing one client; `epsilon`, if given, is a budget that is never exceeded. There are no
    other weights and selections: those by similarity, loss or size depend on other clients' data. Noise and sampling
    come from the operating system; with `noise_seed` they can be repeated, and the run is not private.
    With `quantile`, the bound adapts until so many of the updates are not clipped (Andrew et al. 2021), from `bound`
    on, by steps of `bound_lr`, and by a count with noise of deviation `count_noise` (a twentieth of rate K).

    Use when: the model will be published, and no single client may be recognised in it.
    Not when: there are few clients: noise for ten of them drowns what they learn.
    """
    adaptive = None
    if quantile is not None:
        adaptive = AdaptiveBound(quantile=quantile, lr=bound_lr, count_noise=count_noise)
    plain = averaged(**local)
    assert isinstance(plain.server, Averaging)
    server = PrivateAveraging(
        bound=bound,
        noise=noise,
        rate=rate,
        delta=delta,
        epsilon=epsilon,
        noise_seed=noise_seed,
        adaptive=adaptive,
        step=plain.server.step,
    )
    return Algorithm(selection=Poisson(rate=rate), client=plain.client, server=server)
