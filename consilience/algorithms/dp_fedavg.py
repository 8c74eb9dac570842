"""DP-FedAvg: client-level differential privacy."""

from __future__ import annotations

from typing import Unpack

from consilience.algorithms._common import TrainingOptions, averaged, recipe
from consilience.client.terms.term import Term
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Fraction, Positive, Whole
from consilience.selection.poisson import Poisson
from consilience.server.averaging.averaging import Averaging
from consilience.server.protocols import Step
from consilience.server.rules.private_averaging import AdaptiveBound, PrivateAveraging


class Local(TrainingOptions, total=False):
    """Options that can be changed; selection and weights cannot, since the privacy proof fixes them."""

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
    with respect to adding or removing one client; `epsilon`, if given, is a budget that is never exceeded. Other
    weightings and selections are not supported: by similarity, loss or size they depend on other clients' data. Noise
    and sampling use the operating system's generator; with `noise_seed` they can be repeated, and the run is not
    private. With `quantile`, the bound starts at `bound` and adapts, at rate `bound_lr`, until this share of the
    updates is not clipped (Andrew et al. 2021); their count gets noise of standard deviation `count_noise` (default:
    rate K / 20).

    Use when: the model will be published and must not reveal whether a client took part.
    Not when: there are few clients: with ten of them the noise outweighs the updates.
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
