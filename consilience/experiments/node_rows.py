"""Runs whose rows stay on the machines of a Ray cluster: their description, and settings that are incompatible."""

from __future__ import annotations

import numpy as np

from consilience.core.capabilities import PoolsData, capability
from consilience.core.settings import Invalid
from consilience.data.dataset import Dataset
from consilience.data.datasets.node_files import NodeFiles
from consilience.engines.ray.node_data import NodeFederation
from consilience.experiments.config.config import Config


def described(config: Config) -> NodeFederation:
    """The clients' description, as reported by the machines of the engine's cluster."""
    options = dict(config.data.options)
    classes = options.pop("classes", None)
    source = NodeFiles(**options)
    return NodeFederation.find(source, classes=classes, address=config.engine.get("address"))


def example_of(found: NodeFederation, name: str) -> tuple[Dataset, list[np.ndarray]]:
    """(rows of zeros in place of the clients', the row numbers of each client in their concatenation)."""
    x, y = found.example()
    data = Dataset(name=name, x=x, y=y, test_x=x[:0], test_y=y[:0], classes=found.classes, group_names=found.names)
    sizes = found.train.sizes.numpy()
    return data, np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])


def refuse_reading_here(config: Config) -> None:
    """Refuse settings that need all rows in one place."""
    if config.engine.get("name", "vectorised") != "ray":
        raise Invalid("data.name = 'node_files' needs engine = 'ray'; on one machine use data.name = 'client_files'")
    if config.partition.name != "natural":
        raise Invalid(
            f"partition.name = {config.partition.name!r} is not supported by data.name = 'node_files', where every "
            "file is a client: set partition = 'natural'"
        )
    needing = {
        "validation.share": config.validation.share is not None,
        "evaluation.validation": config.evaluation.validation is not None,
        "evaluation.local": config.evaluation.local,
        "task.class_weights = 'balanced'": config.task.class_weights == "balanced",
        "task.labels": bool(config.task.labels),
        f"algorithm.name = {config.algorithm.name!r}": capability(config.algorithm.built.selection, PoolsData)
        is not None,
    }
    for setting, given in needing.items():
        if given:
            raise Invalid(f"{setting} needs the rows in one place: data.name = 'node_files' leaves them where they lie")
