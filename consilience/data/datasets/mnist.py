"""MNIST and the data sets that share its format: Fashion-MNIST and EMNIST."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Literal

import numpy as np

from consilience.core.settings import Invalid
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.labels import class_numbers
from consilience.data.datasets.prepare.pictures import Normalise, channels_first, scale_pictures
from consilience.data.readers.files import Source, source
from consilience.data.readers.idx import read_idx
from consilience.data.readers.npz import read_npz

MNIST_HOME = "Its home is http://yann.lecun.com/exdb/mnist; mnist.npz is the Keras copy."
FASHION_HOME = "Its home is https://github.com/zalandoresearch/fashion-mnist."
EMNIST_HOME = (
    "Its home is https://www.nist.gov/itl/products-and-services/emnist-dataset (take the binary format, gzip.zip)."
)
DIGITS = tuple(string.digits)
GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
MERGED = (*string.digits, *string.ascii_uppercase, *"abdefghnqrt")  # small letters that differ from their capital
EMNIST_NAMES = {
    "byclass": (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase),
    "bymerge": MERGED,
    "balanced": MERGED,
    "letters": tuple(string.ascii_uppercase),
    "digits": DIGITS,
    "mnist": DIGITS,
}
Pair = tuple[np.ndarray, np.ndarray]


def mnist(*, normalise: Normalise = "standard", data_dir: str | Path | None = None) -> Dataset:
    """60,000 + 10,000 handwritten digits, grey 28x28, 10 classes."""
    return _picture_set("mnist", *mnist_pictures(data_dir), DIGITS, normalise)


def fashion_mnist(*, normalise: Normalise = "standard", data_dir: str | Path | None = None) -> Dataset:
    """60,000 + 10,000 articles of clothing, grey 28x28, 10 classes."""
    place = source("fashion_mnist", data_dir, folders=("FashionMNIST/raw",), how=FASHION_HOME)
    return _picture_set("fashion_mnist", *_four_files(place, "fashion_mnist.npz"), GARMENTS, normalise)


def emnist(
    *,
    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = "balanced",
    normalise: Normalise = "standard",
    data_dir: str | Path | None = None,
) -> Dataset:
    """Handwritten digits and letters, grey 28x28; `split` chooses the classes (62, 47, 47, 26, 10, 10)."""
    place = source("emnist", data_dir, folders=("EMNIST/raw", "emnist/gzip", "gzip"), how=EMNIST_HOME)
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    files = [f"emnist-{split}-{part}-{kind}" for part in ("train", "test") for kind in kinds]
    _, paths = place.locate({"idx": files})
    names = EMNIST_NAMES[split]
    first = 1 if split == "letters" else 0  # the file numbers letters from 1
    pairs = [_idx_pair(*paths[k : k + 2], classes=len(names), first=first) for k in (0, 2)]
    # The files hold every picture with rows and columns exchanged.
    train, test = ((pictures.swapaxes(2, 3), labels) for pictures, labels in pairs)
    return _picture_set(f"emnist_{split}", train, test, names, normalise)


def mnist_pictures(data_dir: str | Path | None) -> tuple[Pair, Pair]:
    """MNIST as (pictures [N, 1, H, W] uint8, labels [N]), training and test."""
    place = source("mnist", data_dir, folders=("MNIST/raw",), how=MNIST_HOME)
    return _four_files(place, "mnist.npz")


def _four_files(place: Source, archive: str) -> tuple[Pair, Pair]:
    """Four IDX files under either customary spelling, or one Keras archive, of 10 classes."""
    forms = {}
    for mark in ("-", "."):
        kinds = (f"images{mark}idx3-ubyte", f"labels{mark}idx1-ubyte")
        forms[f"idx{mark}"] = [f"{part}-{kind}" for part in ("train", "t10k") for kind in kinds]
    form, paths = place.locate({**forms, "npz": [archive]})
    if form != "npz":
        return _idx_pair(*paths[:2], classes=10), _idx_pair(*paths[2:], classes=10)
    arrays = read_npz(paths[0], ("x_train", "y_train", "x_test", "y_test"))
    return (
        _checked_pair(arrays["x_train"], arrays["y_train"], 10, f"{paths[0]}, y_train"),
        _checked_pair(arrays["x_test"], arrays["y_test"], 10, f"{paths[0]}, y_test"),
    )


def _idx_pair(pictures: Path, labels: Path, *, classes: int, first: int = 0) -> Pair:
    numbers = read_idx(labels, dimensions=1).astype(np.int64) - first
    return _checked_pair(read_idx(pictures, dimensions=3), numbers, classes, labels)


def _checked_pair(pictures: np.ndarray, labels: np.ndarray, classes: int, where: Path | str) -> Pair:
    if pictures.dtype != np.uint8:
        raise Invalid(f"{where}: the pictures must be bytes, not {pictures.dtype}")
    numbers = class_numbers(labels, rows=len(pictures), classes=classes, where=where)
    return channels_first(pictures, where), numbers


def _picture_set(name: str, train: Pair, test: Pair, names: tuple[str, ...], normalise: Normalise) -> Dataset:
    if train[0].shape[1:] != test[0].shape[1:]:
        raise Invalid(f"{name}: training pictures are {train[0].shape[1:]}, test pictures {test[0].shape[1:]}")
    x, test_x = scale_pictures(train[0], test[0], normalise)
    return assemble(name, (x, train[1]), (test_x, test[1]), classes=len(names), label_names=names)
