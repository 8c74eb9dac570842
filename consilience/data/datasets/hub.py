"""Data sets by name from the Hugging Face hub, whole or cut into clients by Flower's partitioners."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from consilience.core.settings import Count, Invalid, Positive, Whole
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.features import Scaling
from consilience.data.datasets.prepare.hub_rows import HubReading, read_labels
from consilience.data.datasets.prepare.labels import number_names
from consilience.data.datasets.prepare.splits import HeldOut, given_or_held_out
from consilience.data.datasets.prepare.texts import TextFeatures, TextForm, VocabularySize
from consilience.data.readers.pictures import Fit

NO_TEST = "none"


def hugging_face(
    *,
    path: str,
    config: str | None = None,
    x: str | None = None,
    label: str | None = None,
    group: str | None = None,
    train_split: str = "train",
    test_split: str = "test",
    size: Count | None = None,
    fit: Fit = "crop",
    grey: bool = False,
    normalise: Scaling = "standard",
    text: TextForm = "words",
    length: Count = 64,
    max_vocabulary: VocabularySize = 20000,
    ngram_features: Count = 4096,
    encoder: str | None = None,
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
) -> Dataset:
    """Any data set that `datasets.load_dataset(path, config)` can load; `group` names a column of natural clients.

    The input and label columns are found by their usual names or named by `x` and `label`; `test_split`
    "none" draws test rows from the training ones.
    """
    library = _library("datasets", "hub")
    try:
        splits = library.load_dataset(path, config)
    except (OSError, ValueError) as problem:
        raise _not_loaded("datasets", path, config, problem) from problem
    wanted = [train_split] if test_split == NO_TEST else [train_split, test_split]
    for split in wanted:
        if split not in splits:
            raise Invalid(f"{path} has the splits {', '.join(splits)}, not {split!r}: set train_split and test_split")
    reading = HubReading(
        x=x,
        label=label,
        size=size,
        fit=fit,
        grey=grey,
        normalise=normalise,
        texts=TextFeatures(
            form=text, length=length, max_vocabulary=max_vocabulary, ngram_features=ngram_features, encoder=encoder
        ),
    )
    parts = [splits[split] for split in wanted]
    owners: np.ndarray | None = None
    names: tuple[str, ...] = ()
    if group is not None:
        column = [str(value) for part in parts for value in part[group]]
        owners, names = number_names(column, where=path)
    test_count = len(parts[1]) if len(parts) > 1 else None
    return _hub_set(path, parts, test_count, reading, owners, names, (test_fraction, seed))


def flower_datasets(
    *,
    dataset: str,
    partitioner: Literal["iid", "dirichlet", "pathological", "shards", "natural", "linear", "square", "exponential"],
    partitions: Count = 10,
    partition_by: str = "label",
    alpha: Positive = 0.5,
    min_partition_size: Whole = 10,
    classes_per_partition: Count = 2,
    shards_per_partition: Count = 2,
    subset: str | None = None,
    x: str | None = None,
    label: str | None = None,
    train_split: str = "train",
    test_split: str = "test",
    size: Count | None = None,
    fit: Fit = "crop",
    grey: bool = False,
    normalise: Scaling = "standard",
    text: TextForm = "words",
    length: Count = 64,
    max_vocabulary: VocabularySize = 20000,
    ngram_features: Count = 4096,
    encoder: str | None = None,
    test_fraction: HeldOut = 0.2,
    seed: Whole = 42,
) -> Dataset:
    """A hub data set cut into clients by `flwr_datasets`; each partition is a group.

    "natural" makes one client of each value of `partition_by`. That package reports its use to its makers
    unless FLWR_TELEMETRY_ENABLED=0 is set.
    """
    library, makers = (_library(name, "hub") for name in ("flwr_datasets", "flwr_datasets.partitioner"))
    by = {"num_partitions": partitions, "partition_by": partition_by, "seed": seed}
    make = {
        "iid": lambda: makers.IidPartitioner(num_partitions=partitions),
        "dirichlet": lambda: makers.DirichletPartitioner(**by, alpha=alpha, min_partition_size=min_partition_size),
        "pathological": lambda: makers.PathologicalPartitioner(**by, num_classes_per_partition=classes_per_partition),
        "shards": lambda: makers.ShardPartitioner(**by, num_shards_per_partition=shards_per_partition),
        "natural": lambda: makers.NaturalIdPartitioner(partition_by=partition_by),
        "linear": lambda: makers.LinearPartitioner(num_partitions=partitions),
        "square": lambda: makers.SquarePartitioner(num_partitions=partitions),
        "exponential": lambda: makers.ExponentialPartitioner(num_partitions=partitions),
    }[partitioner]
    try:
        federated = library.FederatedDataset(
            dataset=dataset, subset=subset, partitioners={train_split: make()}, seed=seed
        )
        cut = federated.partitioners[train_split]
        parts = [federated.load_partition(k, train_split) for k in range(cut.num_partitions)]
        tests = [] if test_split == NO_TEST else [federated.load_split(test_split)]
    except OSError as problem:
        raise _not_loaded("flwr-datasets", dataset, subset, problem) from problem
    except ValueError as problem:
        raise Invalid(f"flwr-datasets cannot cut {dataset!r} by {partitioner!r}: {problem}") from problem
    natural = getattr(cut, "partition_id_to_natural_id", {})
    names = tuple(str(natural.get(k, f"client_{k}")) for k in range(len(parts)))
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    reading = HubReading(
        x=x,
        label=label,
        size=size,
        fit=fit,
        grey=grey,
        normalise=normalise,
        texts=TextFeatures(
            form=text, length=length, max_vocabulary=max_vocabulary, ngram_features=ngram_features, encoder=encoder
        ),
    )
    test_count = len(tests[0]) if tests else None
    return _hub_set(dataset, [*parts, *tests], test_count, reading, owners, names, (test_fraction, seed))


def _hub_set(
    name: str,
    parts: Sequence[Any],
    test_count: int | None,
    reading: HubReading,
    owners: np.ndarray | None,
    group_names: tuple[str, ...],
    split: tuple[float, int],
) -> Dataset:
    """Rows of all parts, the last `test_count` of which are the test; owners may cover the training rows only."""
    x_column, label_column = reading.columns(parts[0], name)
    values = [value for part in parts for value in part[x_column]]
    raw_labels = [value for part in parts for value in part[label_column]]
    labels, label_names = read_labels(parts[0], raw_labels, label_column, name)
    given = None if test_count is None else len(labels) - test_count
    train, test = given_or_held_out(labels, given=given, fraction=split[0], seed=split[1], groups=owners)
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


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        package = module.split(".")[0].replace("_", "-")
        raise ImportError(f'this data set needs the package {package}: pip install "consilience[{extra}]"') from problem


def _not_loaded(package: str, path: str, config: str | None, problem: Exception) -> FileNotFoundError:
    return FileNotFoundError(
        f"{package} could not load {path!r} (configuration {config!r}): {problem}. Check its name on "
        "https://huggingface.co/datasets; without a connection, give the folder of a local copy instead"
    )
