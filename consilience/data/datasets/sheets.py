"""Pictures tiled on sheets: any such folder, MNIST-M, and PACS at 64x64 with its four styles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from consilience.core.settings import Count, Invalid, Whole
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.labels import class_numbers
from consilience.data.datasets.prepare.pictures import Normalise, scale_pictures
from consilience.data.datasets.prepare.splits import HeldOut, held_out
from consilience.data.readers.files import Source, chosen_source, source
from consilience.data.readers.npz import read_npz
from consilience.data.readers.pictures import SUFFIXES, read_sheets

HOW = "Tile square pictures row by row on one picture per part and put their labels into labels.npz."
NAME_KEYS = ("names", "class_names")
Pair = tuple[np.ndarray, np.ndarray]


def sheets(
    *,
    folder: str,
    side: Count,
    grey: bool = False,
    normalise: Normalise = "standard",
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
    data_dir: str | Path | None = None,
) -> Dataset:
    """Sheets of side x side pictures with `labels.npz`: y_train and y_test, or one array (and sheet) per group.

    Training and test sheets are `train.*` and `test.*`, or `train_1.*`, `train_2.*` ...; a group's sheet has
    the name of its array, and its test rows are drawn from it.
    """
    place = chosen_source(folder, data_dir, how=HOW)
    return _sheet_set(place.name, place, side, grey, normalise, test_fraction, seed)


def mnist_m(*, normalise: Normalise = "standard", data_dir: str | Path | None = None) -> Dataset:
    """MNIST digits blended with colour patches, 32x32, 10 classes (Ganin et al. 2016)."""
    place = source("mnist_m", data_dir, how=HOW)
    return _sheet_set("mnist_m", place, 32, False, normalise, 0.2, 0)


def pacs64(
    *,
    normalise: Normalise = "standard",
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
    data_dir: str | Path | None = None,
) -> Dataset:
    """9,991 pictures of 64x64, 7 classes, in 4 styles which are its groups (Li et al. 2017)."""
    place = source("pacs64", data_dir, how=HOW)
    return _sheet_set("pacs64", place, 64, False, normalise, test_fraction, seed)


def _sheet_set(
    name: str, place: Source, side: int, grey: bool, normalise: Normalise, fraction: float, seed: int
) -> Dataset:
    archive = place.find("labels.npz")
    arrays = read_npz(archive)
    names = next((tuple(str(n) for n in arrays.pop(key)) for key in NAME_KEYS if key in arrays), ())
    if {"y_train", "y_test"} <= set(arrays):
        parts = [read_part(archive, part, arrays[f"y_{part}"], side, grey) for part in ("train", "test")]
        classes = len(names) or 1 + max(int(y.max()) for _, y in parts)
        x, test_x = scale_pictures(parts[0][0], parts[1][0], normalise)
        train, test = (x, parts[0][1]), (test_x, parts[1][1])
        return assemble(name, train, test, classes=classes, label_names=names)
    groups = tuple(arrays)
    parts = [read_part(archive, group, arrays[group], side, grey) for group in groups]
    pictures, labels = (np.concatenate(values) for values in zip(*parts))
    owners = np.repeat(np.arange(len(groups)), [len(y) for _, y in parts])
    rows, test_rows = held_out(labels, fraction=fraction, seed=seed, groups=owners)
    x, test_x = scale_pictures(pictures[rows], pictures[test_rows], normalise)
    return assemble(
        name,
        (x, labels[rows]),
        (test_x, labels[test_rows]),
        classes=len(names) or int(labels.max()) + 1,
        groups=owners[rows],
        test_groups=owners[test_rows],
        group_names=groups,
        label_names=names,
    )


def read_part(archive: Path, part: str, labels: np.ndarray, side: int, grey: bool = False) -> Pair:
    """(pictures [N, C, side, side], labels [N]) of the sheet or numbered sheets called `part`."""
    paths = find_sheets(archive.parent, part)
    numbers = class_numbers(labels, rows=len(labels), classes=2**31, where=f"{archive}, {part}")
    if len(numbers) == 0:
        raise Invalid(f"{archive} has no labels for {part}")
    return read_sheets(paths, side=side, count=len(numbers), grey=grey), numbers


def find_sheets(folder: Path, part: str) -> Sequence[Path]:
    """`part.webp` (or another picture type), else `part_1`, `part_2` ... in number order."""
    single = [path for suffix in SUFFIXES if (path := folder / f"{part}{suffix}").exists()]
    if single:
        return single[:1]
    numbered: list[Path] = []
    while found := [p for s in SUFFIXES if (p := folder / f"{part}_{len(numbered) + 1}{s}").exists()]:
        numbered.append(found[0])
    if not numbered:
        raise FileNotFoundError(
            f"{folder} has labels for {part!r} but no sheet {part}.webp (.png, .jpg) or {part}_1 ..."
        )
    return numbered
