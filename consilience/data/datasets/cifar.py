"""CIFAR-10 and CIFAR-100: binary records, Python batches, or (CIFAR-10) tiled picture sheets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from consilience.core.settings import Range
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.labels import class_numbers
from consilience.data.datasets.prepare.pictures import Normalise, scale_pictures
from consilience.data.readers.cifar import read_binary_batch, read_label_names, read_python_batch
from consilience.data.readers.files import source
from consilience.data.readers.npz import read_npz
from consilience.data.readers.pictures import read_sheets

HOME = "Its home is https://www.cs.toronto.edu/~kriz/cifar.html (binary or Python version, unpacked)."
CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
Pair = tuple[np.ndarray, np.ndarray]
ReadBatch = Callable[[Path], tuple[np.ndarray, np.ndarray]]


def cifar10(
    *,
    normalise: Normalise = "standard",
    batches: Annotated[int, Range(least=1, most=5)] = 5,
    data_dir: str | Path | None = None,
) -> Dataset:
    """50,000 + 10,000 colour pictures of 32x32, 10 classes; `batches` of the five training files are read."""
    place = source("cifar10", data_dir, folders=("cifar-10-batches-bin", "cifar-10-batches-py"), how=HOME)
    numbers = range(1, batches + 1)
    forms = {
        "binary": [*(f"data_batch_{k}.bin" for k in numbers), "test_batch.bin"],
        "python": [*(f"data_batch_{k}" for k in numbers), "test_batch"],
        "sheets": [*(f"train_{k}.webp" for k in numbers), "test.webp", "labels.npz"],
    }
    form, paths = place.locate(forms)
    if form == "sheets":
        train, test = _read_sheets(paths, batches)
    elif form == "binary":
        train, test = _read_batches(paths, lambda path: read_binary_batch(path, label_bytes=1), 0, 10)
    else:
        train, test = _read_batches(paths, lambda path: read_python_batch(path, label_names=("labels",)), 0, 10)
    x, test_x = scale_pictures(train[0], test[0], normalise)
    return assemble("cifar10", (x, train[1]), (test_x, test[1]), classes=10, label_names=CIFAR10_NAMES)


def cifar100(
    *,
    labels: Literal["fine", "coarse"] = "fine",
    normalise: Normalise = "standard",
    data_dir: str | Path | None = None,
) -> Dataset:
    """50,000 + 10,000 colour pictures of 32x32, 100 fine or 20 coarse classes."""
    place = source("cifar100", data_dir, folders=("cifar-100-binary", "cifar-100-python"), how=HOME)
    form, paths = place.locate({"binary": ["train.bin", "test.bin"], "python": ["train", "test"]})
    classes = 100 if labels == "fine" else 20
    if form == "binary":  # each record starts with the coarse label, then the fine one
        column = 0 if labels == "coarse" else 1
        train, test = _read_batches(paths, lambda path: read_binary_batch(path, label_bytes=2), column, classes)
        names_file = paths[0].with_name(f"{labels}_label_names.txt")
    else:
        key = (f"{labels}_labels",)
        train, test = _read_batches(paths, lambda path: read_python_batch(path, label_names=key), 0, classes)
        names_file = paths[0].with_name("meta")
    names = read_label_names(names_file, f"{labels}_label_names") if names_file.exists() else ()
    x, test_x = scale_pictures(train[0], test[0], normalise)
    return assemble(f"cifar100_{labels}", (x, train[1]), (test_x, test[1]), classes=classes, label_names=names)


def _read_batches(paths: Sequence[Path], read: ReadBatch, column: int, classes: int) -> tuple[Pair, Pair]:
    """Read batches: the last file holds the test pictures; `column` selects one of several labels."""
    pairs = []
    for path in paths:
        pictures, labels = read(path)
        pairs.append((pictures, class_numbers(labels[:, column], rows=len(pictures), classes=classes, where=path)))
    train = tuple(np.concatenate(arrays) for arrays in zip(*pairs[:-1]))
    return (train[0], train[1]), pairs[-1]


def _read_sheets(paths: Sequence[Path], batches: int) -> tuple[Pair, Pair]:
    """Five training sheets of equal length and a test sheet, labels beside them."""
    *train_sheets, test_sheet, archive = paths
    arrays = read_npz(archive, ("y_train", "y_test"))
    y = arrays["y_train"][: len(arrays["y_train"]) * batches // 5]
    y, test_y = (class_numbers(part, rows=len(part), classes=10, where=archive) for part in (y, arrays["y_test"]))
    pictures = read_sheets([*train_sheets], side=32, count=len(y))
    return (pictures, y), (read_sheets([test_sheet], side=32, count=len(test_y)), test_y)
