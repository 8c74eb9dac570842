"""Partitions of rows over clients: disjoint, seeded, saved with a fingerprint, drawn in bounded time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from consilience.core.settings import Invalid, check_options, nearest
from consilience.data.partition.assignment import Assignment, Partition, assign
from consilience.data.partition.classes_per_client import ClassesPerClient
from consilience.data.partition.dirichlet import Dirichlet
from consilience.data.partition.feature_shift import FeatureShift
from consilience.data.partition.iid import Iid
from consilience.data.partition.label_sets import LabelSets
from consilience.data.partition.missing_modality import MissingModality
from consilience.data.partition.mixture import Mixture
from consilience.data.partition.natural import Natural
from consilience.data.partition.quantity import Quantity
from consilience.data.partition.shards import Shards
from consilience.data.partition.storage import decoded, encoded, fingerprint, load, save
from consilience.data.partition.stored import Stored

PARTITIONS: dict[str, type] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "classes_per_client": ClassesPerClient,
    "label_sets": LabelSets,
    "shards": Shards,
    "quantity": Quantity,
    "natural": Natural,
    "feature_shift": FeatureShift,
    "missing_modality": MissingModality,
    "mixture": Mixture,
    "stored": Stored,
}

__all__ = [
    "PARTITIONS",
    "Assignment",
    "ClassesPerClient",
    "Dirichlet",
    "FeatureShift",
    "Iid",
    "LabelSets",
    "MissingModality",
    "Mixture",
    "Natural",
    "Partition",
    "Quantity",
    "Shards",
    "Stored",
    "assign",
    "decoded",
    "encoded",
    "fingerprint",
    "load",
    "partition",
    "save",
]


def partition(name: str, **options: Any) -> Partition:
    """A partition by its name, options checked: `partition("dirichlet", clients=20, alpha=0.5)`.

    A partition inside another is a table with a name: `inner={"name": "iid", "clients": 10}`. `consilience list
    partitions` shows all names with their options; `federate` applies one to a data set.
    """
    return _build("partition", {"name": name, **options})


def _build(key: str, table: Mapping[str, Any]) -> Partition:
    options = {option: _build_inner(f"{key}.{option}", value) for option, value in table.items() if option != "name"}
    name = table.get("name")
    kind = PARTITIONS.get(name.replace("-", "_")) if isinstance(name, str) else None
    if kind is None:
        raise Invalid(f"{key}.name = {name!r} is not one of {', '.join(PARTITIONS)}{nearest(name, PARTITIONS)}")
    options = check_options(kind, options, key)
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.name not in options:
            raise Invalid(f"{key}.{field.name} is missing: {name} needs it")
    return kind(**options)


def _build_inner(key: str, value: Any) -> Any:
    """Build partitions from tables with a name, at any depth of an option."""
    if isinstance(value, Mapping):
        return _build(key, value)
    if isinstance(value, (list, tuple)):
        return type(value)(_build_inner(f"{key}[{i}]", item) for i, item in enumerate(value))
    return value
