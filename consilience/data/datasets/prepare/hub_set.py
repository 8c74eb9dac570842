"""Opens data sets of Hugging Face and turns their rows into a `Dataset`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.hub_rows import HubReading, read_labels
from consilience.data.datasets.prepare.splits import given_or_held_out


def hub_set(
    name: str,
    parts: Sequence[Any],
    test_count: int | None,
    reading: HubReading,
    owners: np.ndarray | None,
    group_names: tuple[str, ...],
    split: tuple[float, int],
) -> Dataset:
    """The data set of all parts' rows, the last `test_count` of which are test rows; test rows need no owners."""
    x_column, label_column = reading.columns(parts[0], name)
    raw_labels = [value for part in parts for value in part[label_column]]
    labels, label_names = read_labels(parts[0], raw_labels, label_column, name)
    given = None if test_count is None else len(labels) - test_count
    train, test = given_or_held_out(labels, given=given, fraction=split[0], seed=split[1], groups=owners)
    if reading.rows == "file":
        x, test_x, vocabulary = reading.kept(parts, x_column, train, test, name)
    else:
        values = [value for part in parts for value in part[x_column]]
        x, test_x, vocabulary = reading.features([values[row] for row in train], [values[row] for row in test], name)
    owns_test = owners is not None and len(owners) == len(labels)
    return assemble(
        name,
        (x, labels[train]),
        (test_x, labels[test]),
        classes=len(label_names),
        groups=None if owners is None else owners[train],
        test_groups=owners[test] if owners is not None and owns_test else None,
        group_names=group_names,
        label_names=label_names,
        vocabulary=vocabulary,
    )


def open_hub(path: str, config: str | None) -> Any:
    """A data set by its name or folder: what `load_dataset` gives, or `load_from_disk` of a folder saved so."""
    library = hub_library("datasets", "hub")
    saved = any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        return library.load_from_disk(path) if saved else library.load_dataset(path, config)
    except (OSError, ValueError) as problem:
        raise not_loaded("datasets", path, config, problem) from problem


def hub_library(module: str, extra: str) -> Any:
    """Import an optional package; the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        package = module.split(".")[0].replace("_", "-")
        raise ImportError(f'this data set needs the package {package}: pip install "consilience[{extra}]"') from problem


def not_loaded(package: str, path: str, config: str | None, problem: Exception) -> FileNotFoundError:
    """Why a data set could not be loaded, and what to do."""
    return FileNotFoundError(
        f"{package} could not load {path!r} (configuration {config!r}): {problem}. Check its name on "
        "https://huggingface.co/datasets; without a connection, give the folder of a local copy instead"
    )
