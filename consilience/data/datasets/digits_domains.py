"""Digits in three styles: the feature-shift federation of FedBN's digit experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from consilience.core.settings import Count, Invalid, Whole
from consilience.data.dataset import Dataset
from consilience.data.datasets.mnist import DIGITS, mnist_pictures
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.labels import class_numbers
from consilience.data.datasets.prepare.pictures import Normalise, resize_square, scale_pictures
from consilience.data.datasets.prepare.splits import at_most
from consilience.data.datasets.sheets import HOW, read_part
from consilience.data.readers.files import source
from consilience.data.readers.npz import read_npz

USPS_HOME = "usps.npz holds x_train, y_train, x_test, y_test with pixels as whole numbers 0 .. 2000."
USPS_TOP = 2000
SIDE = 32
Pair = tuple[np.ndarray, np.ndarray]


def usps(*, normalise: Normalise = "standard", data_dir: str | Path | None = None) -> Dataset:
    """7,291 + 2,007 digits from envelopes, grey 16x16, 10 classes (Hull 1994)."""
    train, test = usps_pictures(data_dir)
    x, test_x = scale_pictures(train[0], test[0], normalise, top=USPS_TOP)
    return assemble("usps", (x, train[1]), (test_x, test[1]), classes=10, label_names=DIGITS)


def digits_domains(
    *,
    styles: tuple[Literal["mnist", "mnist_m", "usps"], ...] = ("mnist", "mnist_m", "usps"),
    train_per_style: Count | None = 7500,
    test_per_style: Count | None = 2000,
    normalise: Normalise = "standard",
    seed: Whole = 0,
    data_dir: str | Path | None = None,
) -> Dataset:
    """MNIST, MNIST-M and USPS at 32x32 in colour, one group per style; None takes all rows of each."""
    if not styles or len(set(styles)) != len(styles):
        raise Invalid(f"digits_domains.styles = {styles!r} must name at least one style, none twice")
    read = {"mnist": mnist_pictures, "mnist_m": _mnist_m_pictures, "usps": _usps_bytes}
    pairs = [read[style](data_dir) for style in styles]
    chosen = [
        [_at_most(pair, most, seed) for pair, most in zip(parts, (train_per_style, test_per_style))] for parts in pairs
    ]
    (pictures, labels, owners), (test_pictures, test_labels, test_owners) = (
        _join([parts[part] for parts in chosen]) for part in (0, 1)
    )
    x, test_x = scale_pictures(pictures, test_pictures, normalise)
    return assemble(
        "digits_domains",
        (x, labels),
        (test_x, test_labels),
        classes=10,
        groups=owners,
        test_groups=test_owners,
        group_names=tuple(styles),
        label_names=DIGITS,
    )


def usps_pictures(data_dir: str | Path | None) -> tuple[Pair, Pair]:
    """USPS as (pictures [N, 1, 16, 16] of 0 .. 2000, labels [N]), training and test."""
    path = source("usps", data_dir, how=USPS_HOME).find("usps.npz")
    arrays = read_npz(path, ("x_train", "y_train", "x_test", "y_test"))
    pairs = []
    for part in ("train", "test"):
        pixels = arrays[f"x_{part}"]
        if pixels.ndim != 3 or pixels.dtype.kind != "u" or (pixels.size and pixels.max() > USPS_TOP):
            raise Invalid(f"{path}: x_{part} must hold pictures [N, H, W] of whole numbers 0 .. {USPS_TOP}")
        numbers = class_numbers(arrays[f"y_{part}"], rows=len(pixels), classes=10, where=f"{path}, y_{part}")
        pairs.append((pixels[:, None], numbers))
    return pairs[0], pairs[1]


def _usps_bytes(data_dir: str | Path | None) -> tuple[Pair, Pair]:
    train, test = usps_pictures(data_dir)
    as_bytes = [((pixels * np.float32(255 / USPS_TOP) + 0.5).astype(np.uint8), y) for pixels, y in (train, test)]
    return as_bytes[0], as_bytes[1]


def _mnist_m_pictures(data_dir: str | Path | None) -> tuple[Pair, Pair]:
    archive = source("mnist_m", data_dir, how=HOW).find("labels.npz")
    arrays = read_npz(archive, ("y_train", "y_test"))
    return read_part(archive, "train", arrays["y_train"], 32), read_part(archive, "test", arrays["y_test"], 32)


def _at_most(pair: Pair, most: int | None, seed: int) -> Pair:
    rows = at_most(pair[1], most, seed=seed)
    pictures = resize_square(pair[0][rows], SIDE)
    return np.broadcast_to(pictures, (len(pictures), 3, SIDE, SIDE)), pair[1][rows]


def _join(pairs: list[Pair]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pictures, labels and style numbers of all styles, concatenated."""
    pictures, labels = (np.concatenate(values) for values in zip(*pairs))
    return pictures, labels, np.repeat(np.arange(len(pairs)), [len(y) for _, y in pairs])
