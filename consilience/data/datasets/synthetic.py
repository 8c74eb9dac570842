"""The synthetic federation of the FedProx paper, with its two parameters of heterogeneity."""

from __future__ import annotations

import numpy as np

from consilience.core.settings import Count, NonNegative, Whole
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.splits import HeldOut, held_out

STREAM = 0x5F  # a stream of its own: independent of other draws with the same seed


def synthetic(
    *,
    alpha: NonNegative = 1.0,
    beta: NonNegative = 1.0,
    clients: Count = 30,
    iid: bool = False,
    dimension: Count = 60,
    classes: Count = 10,
    max_size: Count | None = None,
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
) -> Dataset:
    """Li et al. 2020, "Federated Optimization in Heterogeneous Networks", section 5.1: Synthetic(alpha, beta).

    u_k ~ N(0, alpha), W_k and b_k ~ N(u_k, 1); B_k ~ N(0, beta), v_k ~ N(B_k, 1), x ~ N(v_k, diag(j^-1.2));
    y = argmax(softmax(W_k x + b_k)); sizes are log-normal(4, 2) + 50. `iid`: one W, b and x ~ N(0, .) for all.
    """
    rng = np.random.default_rng([seed, STREAM])
    sizes = rng.lognormal(4, 2, clients).astype(np.int64) + 50
    if max_size is not None:
        sizes = np.minimum(sizes, max_size)
    # Paper: N(0, alpha) does not say variance or deviation. Here: deviation, as in the authors' generator.
    model_means = rng.normal(0, alpha, clients)  # u_k
    input_means = rng.normal(0, beta, clients)  # B_k
    deviations = np.arange(1, dimension + 1) ** -0.6  # square root of j^-1.2
    shared = _linear_model(rng, 0.0, dimension, classes)
    features, labels = [], []
    for k in range(clients):
        centre = np.zeros(dimension) if iid else rng.normal(input_means[k], 1, dimension)  # v_k
        matrix, offset = shared if iid else _linear_model(rng, model_means[k], dimension, classes)
        x = centre + deviations * rng.standard_normal((sizes[k], dimension))
        features.append(x.astype(np.float32))
        labels.append(np.argmax(x @ matrix + offset, axis=1))
    x, y = np.concatenate(features), np.concatenate(labels)
    owners = np.repeat(np.arange(clients), sizes)
    train, test = held_out(np.zeros(len(y)), fraction=test_fraction, seed=seed, groups=owners)
    return assemble(
        "synthetic_iid" if iid else f"synthetic({alpha:g}, {beta:g})",
        (x[train], y[train]),
        (x[test], y[test]),
        classes=classes,
        groups=owners[train],
        test_groups=owners[test],
        group_names=tuple(f"client_{k}" for k in range(clients)),
    )


def _linear_model(rng: np.random.Generator, mean: float, dimension: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """W [dimension, classes] and b [classes], every entry N(mean, 1)."""
    return rng.normal(mean, 1, (dimension, classes)), rng.normal(mean, 1, classes)
