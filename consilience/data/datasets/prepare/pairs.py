"""Features and labels from the customary names inside an .npz file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from consilience.core.settings import Invalid
from consilience.data.datasets.prepare.assemble import refuse_nonfinite
from consilience.data.datasets.prepare.labels import class_numbers
from consilience.data.readers.npz import npz_names, read_npz

EXPECTED = (
    "It must hold x_train, y_train, x_test and y_test; or train_images, train_labels, test_images and test_labels; "
    "or x and y."
)
KERAS = {part: (f"x_{part}", f"y_{part}") for part in ("train", "val", "test")}
MEDMNIST = {part: (f"{part}_images", f"{part}_labels") for part in ("train", "val", "test")}
ALONE = {"train": ("x", "y")}
MOST_CLASSES = 2**31
Pair = tuple[np.ndarray, np.ndarray]
Validation = Literal["drop", "train", "test"]
"""What to do with validation rows: leave them out, or add them to the training or the test rows."""


def read_pairs(path: Path, validation: Validation = "drop") -> dict[str, Pair]:
    """The (features, class numbers) of an archive: "train" and, where it has one, "test"."""
    names = npz_names(path)
    keys = next((keys for keys in (KERAS, MEDMNIST, ALONE) if set(keys["train"]) <= set(names)), None)
    if keys is None:
        raise Invalid(f"{path} has the arrays {', '.join(names) or 'none'}. {EXPECTED}")
    present = {part: pair for part, pair in keys.items() if set(pair) <= set(names)}
    arrays = read_npz(path, [name for pair in present.values() for name in pair])
    pairs = {part: _checked_pair(path, arrays, *pair) for part, pair in present.items()}
    extra = pairs.pop("val", None)
    if extra is not None and validation != "drop":
        known = pairs.get(validation)
        pairs[validation] = (
            extra
            if known is None
            else (
                np.concatenate([known[0], extra[0]]),
                np.concatenate([known[1], extra[1]]),
            )
        )
    return pairs


def _checked_pair(path: Path, arrays: Mapping[str, np.ndarray], x_name: str, y_name: str) -> Pair:
    x, y = arrays[x_name], arrays[y_name]
    if x.dtype.kind not in "uif" or x.ndim < 2:
        raise Invalid(f"{path}: {x_name} must hold rows of numbers, not {x.dtype} of shape {x.shape}")
    refuse_nonfinite(x, f"{path}, {x_name}")
    if y.dtype.kind == "f" and np.array_equal(y, np.round(y)):
        y = y.astype(np.int64)  # class numbers that were saved as decimals
    return x, class_numbers(y, rows=len(x), classes=MOST_CLASSES, where=f"{path}, {y_name}")
