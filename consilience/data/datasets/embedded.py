"""Small data sets that come with scikit-learn: nothing to download."""

from __future__ import annotations

import numpy as np

from consilience.core.settings import Whole
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.columns import standardised
from consilience.data.datasets.prepare.splits import HeldOut, held_out


def digits(*, test_fraction: HeldOut = 0.2, seed: Whole = 0) -> Dataset:
    """1,797 handwritten digits of 8x8 pixels scaled to [0, 1], 10 classes."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    pictures = (pixels / 16).reshape(-1, 1, 8, 8).astype(np.float32)
    train, test = held_out(labels, fraction=test_fraction, seed=seed)
    names = tuple(str(digit) for digit in range(10))
    return assemble(
        "digits",
        (pictures[train], labels[train]),
        (pictures[test], labels[test]),
        classes=10,
        label_names=names,
    )


def breast_cancer(*, test_fraction: HeldOut = 0.2, seed: Whole = 0) -> Dataset:
    """569 tumours, 30 measurements standardised over the training rows, malignant (0) or benign (1)."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    train, test = held_out(bunch.target, fraction=test_fraction, seed=seed)
    values = standardised(bunch.data, train).astype(np.float32)
    return assemble(
        "breast_cancer",
        (values[train], bunch.target[train]),
        (values[test], bunch.target[test]),
        classes=2,
        label_names=tuple(str(name) for name in bunch.target_names),
        feature_names=tuple(str(name) for name in bunch.feature_names),
    )


def diabetes(*, test_fraction: HeldOut = 0.2, seed: Whole = 0) -> Dataset:
    """442 patients, 10 measurements; target: diabetes progression after a year, standardised over the training rows."""
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    train, test = held_out(np.zeros(len(bunch.target)), fraction=test_fraction, seed=seed)
    values = standardised(bunch.data, train).astype(np.float32)
    targets = standardised(bunch.target, train).astype(np.float32)
    return assemble(
        "diabetes",
        (values[train], targets[train]),
        (values[test], targets[test]),
        classes=None,
        feature_names=tuple(str(name) for name in bunch.feature_names),
    )
