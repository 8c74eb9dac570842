"""Hugging Face and Flower data sets, with small stand-ins for the libraries."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from consilience.core.settings import Invalid
from consilience.data.datasets import load


class ClassLabel:
    def __init__(self, names):
        self.names = names


class Rows:
    """What `datasets.Dataset` shows of itself: columns by name, features, a length."""

    def __init__(self, columns, features=None):
        self.columns, self.features = columns, features or {}
        self.column_names = list(columns)

    def __getitem__(self, name):
        return self.columns[name]

    def __len__(self):
        return len(next(iter(self.columns.values())))


@pytest.fixture
def hub(monkeypatch):
    """A `datasets` module that serves whatever is put into it."""
    served = {}

    def load_dataset(path, config=None):
        if (path, config) not in served:
            raise FileNotFoundError(f"{path} is not on the hub")
        return served[path, config]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return served


def pictures(levels, side=4):
    from PIL import Image

    return [Image.fromarray(np.full((side, side), level, np.uint8)) for level in levels]


def test_pictures_with_named_classes(hub):
    labels = {"label": ClassLabel(["cat", "dog"])}
    hub["zoo", None] = {
        "train": Rows({"image": pictures([0, 51, 102]), "label": [0, 1, 1]}, labels),
        "test": Rows({"image": pictures([255]), "label": [0]}, labels),
    }
    data = load("hugging_face", path="zoo", grey=True, normalise="unit")
    assert data.x.shape == (3, 1, 4, 4) and torch.allclose(data.x[:, 0, 0, 0], torch.tensor([0, 0.2, 0.4]))
    assert data.label_names == ("cat", "dog") and data.y.tolist() == [0, 1, 1] and data.test_y.tolist() == [0]
    assert load("hugging_face", path="zoo", size=2).x.shape == (3, 3, 2, 2)


def test_texts_groups_and_a_drawn_test(hub):
    rows = {"id": list(range(6)), "sentence": [f"word{k}" for k in range(6)], "intent": list("ababab")}
    hub["talk", "small"] = {"train": Rows({**rows, "user": [1, 1, 1, 2, 2, 2]})}
    options = {"path": "talk", "config": "small", "test_split": "none", "group": "user", "test_fraction": 0.34}
    data = load("hugging_face", **options, length=2)
    assert data.x.shape == (4, 2) and data.label_names == ("a", "b") and data.group_names == ("1", "2")
    assert torch.bincount(data.groups).tolist() == [2, 2] and torch.bincount(data.test_groups).tolist() == [1, 1]
    for row, label in zip(data.x.tolist(), data.y.tolist()):
        assert int(data.vocabulary[row[0]][-1]) % 2 == label


def test_numbers(hub):
    hub["table", None] = {
        "train": Rows({"features": [[1.0, 5.0], [3.0, 5.0]], "target": [0, 4]}),
        "validation": Rows({"features": [[5.0, 5.0]], "target": [2]}),
    }
    data = load("hugging_face", path="table", test_split="validation")
    assert data.x.tolist() == [[-1, 0], [1, 0]] and data.test_x.tolist() == [[3, 0]] and data.classes == 5


def test_wrong_hub_data(hub):
    hub["a", None] = {"train": Rows({"image": pictures([0]), "label": [0]})}
    hub["b", None] = {"train": Rows({"stuff": [[1.0], [2.0]], "label": [0, 1]})}
    hub["c", None] = {"train": Rows({"x": [[1.0], [np.nan]], "label": [0, 1]})}
    hub["d", None] = {"train": Rows({"x": [[1.0], [2.0]], "label": [0, 2]}, {"label": ClassLabel(["n", "y"])})}
    hub["e", None] = {"train": Rows({"image": [*pictures([1]), *pictures([1], 3)], "label": [0, 1]})}
    for options, defect in (
        ({"path": "a"}, "has the splits train, not 'test'"),
        ({"path": "b", "test_split": "none"}, "has the columns stuff, label: say which one with the option x"),
        ({"path": "b", "test_split": "none", "x": "stuf"}, r"no column 'stuf' \(did you mean 'stuff'\?\)"),
        ({"path": "c", "test_split": "none", "test_fraction": 0.5}, "NaN"),
        ({"path": "d", "test_split": "none"}, "label 2 of row 1 is not in 0 .. 1"),
        ({"path": "e", "test_split": "none", "test_fraction": 0.5, "seed": 0}, "shape"),
    ):
        with pytest.raises(Invalid, match=defect):
            load("hugging_face", **options)
    with pytest.raises(FileNotFoundError, match=r"could not load 'nothing' .*https://huggingface.co/datasets"):
        load("hugging_face", path="nothing")


def test_missing_packages_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(ImportError, match=r'package datasets: pip install "consilience\[hub\]"'):
        load("hugging_face", path="zoo")
    with pytest.raises(ImportError, match=r'package flwr-datasets: pip install "consilience\[hub\]"'):
        load("flower_datasets", dataset="zoo", partitioner="iid")


class Partitioner:
    """Deals rows out in turn, and remembers how it was made."""

    def __init__(self, **options):
        self.options = options
        self.num_partitions = options.get("num_partitions", 2)
        if "partition_by" in options and "num_partitions" not in options:
            self.partition_id_to_natural_id = {0: "york", 1: "bath"}


@pytest.fixture
def flower(monkeypatch):
    made = {}

    class FederatedDataset:
        def __init__(self, *, dataset, subset, partitioners, seed):
            made.update(dataset=dataset, subset=subset, seed=seed, partitioner=partitioners["train"])
            self.partitioners = partitioners

        def load_partition(self, number, split):
            rows = range(number, 10, self.partitioners[split].num_partitions)
            return Rows({"x": [[float(row)] for row in rows], "label": [row % 2 for row in rows]})

        def load_split(self, split):
            assert split == "test"
            return Rows({"x": [[100.0]], "label": [1]})

    kinds = ("Iid", "Dirichlet", "Pathological", "Shard", "NaturalId", "Linear", "Square", "Exponential")
    makers = types.SimpleNamespace(**{f"{kind}Partitioner": type(kind, (Partitioner,), {}) for kind in kinds})
    package = types.SimpleNamespace(FederatedDataset=FederatedDataset, partitioner=makers)
    monkeypatch.setitem(sys.modules, "flwr_datasets", package)
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", makers)
    return made


@pytest.mark.parametrize(
    ("partitioner", "kind", "options"),
    [
        ("iid", "Iid", {"num_partitions": 3}),
        ("linear", "Linear", {"num_partitions": 3}),
        ("square", "Square", {"num_partitions": 3}),
        ("exponential", "Exponential", {"num_partitions": 3}),
        ("dirichlet", "Dirichlet", {"num_partitions": 3, "alpha": 0.3, "min_partition_size": 10, "seed": 42}),
        ("pathological", "Pathological", {"num_partitions": 3, "num_classes_per_partition": 2, "seed": 42}),
        ("shards", "Shard", {"num_partitions": 3, "num_shards_per_partition": 2, "seed": 42}),
    ],
)
def test_partitions_become_groups(flower, partitioner, kind, options):
    own = {"alpha": 0.3} if partitioner == "dirichlet" else {}
    data = load("flower_datasets", dataset="d", partitioner=partitioner, partitions=3, normalise="none", **own)
    assert type(flower["partitioner"]).__name__ == kind
    given = flower["partitioner"].options
    assert {key: value for key, value in given.items() if key != "partition_by"} == options
    assert data.groups.tolist() == [0] * 4 + [1] * 3 + [2] * 3 and data.group_names[1] == "client_1"
    assert (data.x[:, 0] % 3).tolist() == data.groups.tolist() and (data.x[:, 0] % 2).tolist() == data.y.tolist()
    assert data.test_x.tolist() == [[100]] and data.test_groups is None


def test_natural_partitions_keep_their_names(flower):
    options = {"dataset": "d", "partitioner": "natural", "partition_by": "town"}
    data = load("flower_datasets", **options, test_split="none")
    assert data.group_names == ("york", "bath") and flower["partitioner"].options == {"partition_by": "town"}
    assert torch.bincount(data.groups).tolist() == [4, 4] and torch.bincount(data.test_groups).tolist() == [1, 1]


def test_what_flower_cannot_do_is_explained(flower, monkeypatch):
    module = sys.modules["flwr_datasets"]
    for problem, kind, message in (
        (ConnectionError("no route"), FileNotFoundError, "flwr-datasets could not load 'd' .*no route"),
        (ValueError("too few rows"), Invalid, "cannot cut 'd' by 'iid': too few rows"),
    ):
        monkeypatch.setattr(module.FederatedDataset, "load_split", lambda self, split, p=problem: _raise(p))
        with pytest.raises(kind, match=message):
            load("flower_datasets", dataset="d", partitioner="iid", partitions=3)


def _raise(problem):
    raise problem
