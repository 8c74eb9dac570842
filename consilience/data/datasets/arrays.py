"""Arrays in an .npz file: Keras style, MedMNIST style, or x and y alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from consilience.core.settings import Invalid, Whole
from consilience.data.dataset import Dataset, NewRows
from consilience.data.datasets.prepare.assemble import assemble, refuse_nonfinite
from consilience.data.datasets.prepare.features import Scaling, scale_features
from consilience.data.datasets.prepare.pairs import EXPECTED, Validation, read_pairs
from consilience.data.datasets.prepare.pictures import Normalise
from consilience.data.datasets.prepare.splits import HeldOut, held_out
from consilience.data.readers.files import chosen_file, source
from consilience.data.readers.npz import read_npz

MEDMNIST_HOME = "Its home is https://medmnist.com (take the 28x28 .npz)."

Pair = tuple[np.ndarray, np.ndarray]


def npz(
    *,
    file: str,
    normalise: Scaling = "standard",
    validation: Validation = "drop",
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
    data_dir: str | Path | None = None,
) -> Dataset:
    """Any .npz of features and class numbers; byte arrays are pictures, others are used as they are or standardised."""
    path = chosen_file(file, data_dir, how=EXPECTED)
    return _array_set(path.stem, path, normalise, validation, (test_fraction, seed))


def pneumoniamnist(
    *, normalise: Normalise = "standard", validation: Validation = "drop", data_dir: str | Path | None = None
) -> Dataset:
    """4,708 + 524 + 624 chest X-rays, grey 28x28, normal (0) or pneumonia (1) (MedMNIST v2)."""
    path = source("pneumoniamnist", data_dir, how=MEDMNIST_HOME).find("pneumoniamnist.npz")
    return _array_set("pneumoniamnist", path, normalise, validation, (0.2, 0), ("normal", "pneumonia"))


def _array_set(
    name: str,
    path: Path,
    normalise: Scaling,
    validation: Validation,
    split: tuple[float, int],
    label_names: tuple[str, ...] = (),
) -> Dataset:
    (x, y), (test_x, test_y) = _parts(path, validation, split)
    features, test_features = scale_features(x, test_x, normalise, where=path)
    classes = len(label_names) or 1 + max(int(labels.max(initial=0)) for labels in (y, test_y))
    return assemble(
        name,
        (features, y),
        (test_features, test_y),
        classes=classes,
        label_names=label_names,
        read_rows=ArrayRows(path=path, validation=validation, split=split, normalise=normalise),
    )


def _parts(path: Path, validation: Validation, split: tuple[float, int]) -> tuple[Pair, Pair]:
    """Training and test rows with their labels: as the file splits them, or drawn at random."""
    pairs = read_pairs(path, validation)
    if "test" in pairs:
        return pairs["train"], pairs["test"]
    x, y = pairs["train"]
    rows, test_rows = held_out(y, fraction=split[0], seed=split[1])
    return (x[rows], y[rows]), (x[test_rows], y[test_rows])


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayRows:
    """Reads new arrays as the training arrays were read; the training arrays are read again for their statistics."""

    path: Path
    validation: Validation
    split: tuple[float, int]
    normalise: Scaling

    def __call__(self, path: Path) -> NewRows:
        """The array x of an .npz file, or its only one."""
        arrays = {key: array for key, array in read_npz(path).items() if key != "y"}
        key = "x" if "x" in arrays else next(iter(arrays), "")
        if not key or (key != "x" and len(arrays) > 1):
            raise Invalid(f"{path} has the arrays {', '.join(arrays) or 'none'}: call the rows to predict x")
        x, train = arrays[key], _parts(self.path, self.validation, self.split)[0][0]
        if x.shape[1:] != train.shape[1:] or (x.dtype == np.uint8) != (train.dtype == np.uint8):
            have, need = f"{x.dtype} {x.shape[1:]}", f"{train.dtype} {train.shape[1:]}"
            raise Invalid(f"{path}: rows are {have}, the model was trained on {need}")
        refuse_nonfinite(x, path)
        rows = torch.as_tensor(scale_features(train, x, self.normalise, where=path)[1])
        return NewRows(x=rows, names=tuple(str(row) for row in range(len(x))))
