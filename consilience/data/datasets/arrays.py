"""Arrays in an .npz file: Keras style, MedMNIST style, or x and y alone."""

from __future__ import annotations

from pathlib import Path

from consilience.core.settings import Whole
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.features import Scaling, scale_features
from consilience.data.datasets.prepare.pairs import EXPECTED, Validation, read_pairs
from consilience.data.datasets.prepare.pictures import Normalise
from consilience.data.datasets.prepare.splits import HeldOut, held_out
from consilience.data.readers.files import chosen_file, source

MEDMNIST_HOME = "Its home is https://medmnist.com (take the 28x28 .npz)."


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
    pairs = read_pairs(path, validation)
    if "test" not in pairs:
        x, y = pairs["train"]
        rows, test_rows = held_out(y, fraction=split[0], seed=split[1])
        pairs = {"train": (x[rows], y[rows]), "test": (x[test_rows], y[test_rows])}
    (x, y), (test_x, test_y) = pairs["train"], pairs["test"]
    features, test_features = scale_features(x, test_x, normalise, where=path)
    classes = len(label_names) or 1 + max(int(labels.max(initial=0)) for labels in (y, test_y))
    return assemble(name, (features, y), (test_features, test_y), classes=classes, label_names=label_names)
