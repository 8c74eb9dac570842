"""Arrays in .npy and .safetensors files that may be larger than memory: rows stay in the file until they are needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from consilience.core.settings import Invalid, Whole
from consilience.core.stored_rows import JoinedSource, RowSource, stored
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.features import Scaling
from consilience.data.datasets.prepare.labels import class_numbers
from consilience.data.datasets.prepare.splits import HeldOut, held_out
from consilience.data.datasets.prepare.stored import Keeping, stored_features
from consilience.data.readers.files import chosen_file
from consilience.stores.array_files import ArrayFile

HOW = (
    "It is a .npy file (numpy.save), or the tensor of a .safetensors file, written all.safetensors#x, with one row for "
    "each example."
)
MOST_CLASSES = 2**31


def array_files(
    *,
    x: str,
    y: str,
    test_x: str | None = None,
    test_y: str | None = None,
    groups: str | None = None,
    test_groups: str | None = None,
    rows: Keeping = "file",
    normalise: Scaling | None = None,
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
    data_dir: str | Path | None = None,
) -> Dataset:
    """Features and class numbers in files of arrays: .npy, or a tensor of a .safetensors file (all.safetensors#x).

    Bytes [N, C, H, W], [N, H, W, C] or [N, H, W] are pictures, which stay bytes until they are in a batch and are then
    scaled as `normalise` says ("standard" by default); other numbers are used as they are. `groups` has the number of
    each row's natural client. rows: "file" reads them as batches need them, "memory" all at the start, with the same
    results. Without test_x, test rows are drawn.
    """
    if (test_x is None) != (test_y is None):
        raise Invalid("test_x and test_y belong together: give both, or neither")
    source: RowSource = _array(x, data_dir)
    labels = _numbers(y, data_dir, source.shape[0])
    train, test = np.arange(len(labels)), np.arange(0)
    owners = None if groups is None else _numbers(groups, data_dir, len(labels))
    if test_x is not None and test_y is not None:
        tests = _array(test_x, data_dir)
        if (tests.shape[1:], tests.dtype) != (source.shape[1:], source.dtype):
            raise Invalid(
                f"rows of {test_x} are {tests.dtype} {tests.shape[1:]}, those of {x} {source.dtype} "
                f"{source.shape[1:]}: training and test rows need one type and shape"
            )
        test = len(labels) + np.arange(tests.shape[0])
        labels = np.concatenate([labels, _numbers(test_y, data_dir, tests.shape[0])])
        source = JoinedSource([source, tests])
    else:
        train, test = held_out(labels, fraction=test_fraction, seed=seed, groups=owners)
    test_owners = None
    if owners is not None:
        if test_x is None:
            test_owners = owners[test]
        elif test_groups is not None:
            test_owners = _numbers(test_groups, data_dir, len(test))
    kept = stored_features(source, train, test, normalise, x)
    features, test_features = kept if rows == "file" else (part.here() for part in kept)
    names = 1 + max((int(part.max(initial=0)) for part in (owners, test_owners) if part is not None), default=-1)
    return assemble(
        Path(x.partition("#")[0]).stem,
        (features, labels[train]),
        (test_features, labels[test]),
        classes=1 + int(labels.max(initial=0)),
        groups=None if owners is None else owners[train],
        test_groups=test_owners,
        group_names=tuple(str(number) for number in range(names)),
    )


def _array(file: str, data_dir: str | Path | None) -> ArrayFile:
    path, _, name = file.partition("#")
    return ArrayFile(chosen_file(path, data_dir, how=HOW), name or None)


def _numbers(file: str, data_dir: str | Path | None, rows: int) -> np.ndarray:
    """An array of integers, one for each row."""
    values = stored(_array(file, data_dir))[:].numpy()
    return class_numbers(values, rows=rows, classes=MOST_CLASSES, where=file)
