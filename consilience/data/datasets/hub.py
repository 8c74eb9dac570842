"""Data sets by name from the Hugging Face hub, whole or cut into clients by Flower's partitioners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np

from consilience.core.settings import Count, Invalid, OnlyWith, Positive, Whole
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.features import Scaling
from consilience.data.datasets.prepare.hub_rows import HubReading
from consilience.data.datasets.prepare.hub_set import hub_library, hub_set, not_loaded, open_hub
from consilience.data.datasets.prepare.labels import number_names
from consilience.data.datasets.prepare.splits import HeldOut
from consilience.data.datasets.prepare.stored import Keeping
from consilience.data.datasets.prepare.texts import TOKENS, TextFeatures, TextForm, VocabularySize
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
    fit: Annotated[Fit, OnlyWith("size")] = "crop",
    grey: bool = False,
    normalise: Scaling = "standard",
    text: TextForm = "words",
    length: Annotated[Count, OnlyWith("text", TOKENS)] = 64,
    max_vocabulary: Annotated[VocabularySize, OnlyWith("text", TOKENS)] = 20000,
    ngram_features: Annotated[Count, OnlyWith("text", ("ngrams",))] = 4096,
    encoder: Annotated[str | None, OnlyWith("text", ("encoder",))] = None,
    rows: Keeping = "memory",
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
) -> Dataset:
    """Any data set that `datasets.load_dataset(path, config)` can load, or a folder that `save_to_disk` wrote.

    `group` names a column of natural clients.
    The input and label columns are found by their usual names or named by `x` and `label`; `test_split`
    "none" draws test rows from the training ones. rows: "file" leaves pictures and numbers in the data set's Arrow
    files, and decodes pictures, as batches need them; "memory" reads all at the start, with the same results.
    """
    splits = open_hub(path, config)
    if not isinstance(splits, Mapping):  # one that was saved without splits
        splits, test_split = {train_split: splits}, NO_TEST
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
        rows=rows,
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
    return hub_set(path, parts, test_count, reading, owners, names, (test_fraction, seed))


def flower_datasets(
    *,
    dataset: str,
    partitioner: Literal["iid", "dirichlet", "pathological", "shards", "natural", "linear", "square", "exponential"],
    partitions: Count = 10,
    partition_by: str = "label",
    alpha: Annotated[Positive, OnlyWith("partitioner", ("dirichlet",))] = 0.5,
    min_partition_size: Annotated[Whole, OnlyWith("partitioner", ("dirichlet",))] = 10,
    classes_per_partition: Annotated[Count, OnlyWith("partitioner", ("pathological",))] = 2,
    shards_per_partition: Annotated[Count, OnlyWith("partitioner", ("shards",))] = 2,
    subset: str | None = None,
    x: str | None = None,
    label: str | None = None,
    train_split: str = "train",
    test_split: str = "test",
    size: Count | None = None,
    fit: Annotated[Fit, OnlyWith("size")] = "crop",
    grey: bool = False,
    normalise: Scaling = "standard",
    text: TextForm = "words",
    length: Annotated[Count, OnlyWith("text", TOKENS)] = 64,
    max_vocabulary: Annotated[VocabularySize, OnlyWith("text", TOKENS)] = 20000,
    ngram_features: Annotated[Count, OnlyWith("text", ("ngrams",))] = 4096,
    encoder: Annotated[str | None, OnlyWith("text", ("encoder",))] = None,
    test_fraction: HeldOut = 0.2,
    seed: Whole = 42,
) -> Dataset:
    """A hub data set cut into clients by `flwr_datasets`; each partition is a group.

    "natural" makes one client of each value of `partition_by`. That package reports its use to its makers
    unless FLWR_TELEMETRY_ENABLED=0 is set.
    """
    library, makers = (hub_library(name, "hub") for name in ("flwr_datasets", "flwr_datasets.partitioner"))
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
        raise not_loaded("flwr-datasets", dataset, subset, problem) from problem
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
    return hub_set(dataset, [*parts, *tests], test_count, reading, owners, names, (test_fraction, seed))
