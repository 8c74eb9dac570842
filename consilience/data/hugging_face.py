"""`cs.from_hugging_face`: a federation of data sets of Hugging Face's `datasets`, in memory or saved to disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from consilience.core.federation import Federation
from consilience.core.settings import Count, Invalid, nearest
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.features import Scaling
from consilience.data.datasets.prepare.hub_rows import USUAL_INPUTS, HubReading
from consilience.data.datasets.prepare.hub_set import hub_set, open_hub
from consilience.data.datasets.prepare.labels import number_names
from consilience.data.datasets.prepare.texts import TextFeatures, TextForm
from consilience.data.federate import federate
from consilience.data.frames import frames_dataset
from consilience.data.partition import partition as partition_named
from consilience.data.readers.pictures import Fit

SPLITS = ("train", "test", "validation")


def from_hugging_face(
    data: Any,
    *,
    label: str | None = None,
    x: str | None = None,
    client: str | None = None,
    partition: Any = None,
    size: Count | None = None,
    fit: Fit = "crop",
    grey: bool = False,
    normalise: Scaling = "standard",
    text: TextForm = "words",
    length: Count = 64,
    max_vocabulary: Count = 20000,
    ngram_features: Count = 4096,
    encoder: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Federation:
    """A federation made of Hugging Face `datasets`.

        federation = cs.from_hugging_face(load_from_disk("reviews"), client="shop", text="ngrams")
        federation = cs.from_hugging_face({"north": dataset_a, "south": dataset_b}, label="outcome")

    data: a Dataset; a DatasetDict with the splits train and test; a dict or list of one Dataset per client; or the
        folder of a data set that was saved with `save_to_disk`, as text or path.
    label, x: the columns of targets and inputs (pictures, texts or vectors of numbers); by default those with a usual
        name. Without an input column, all other columns are a table, as in `cs.from_frames`.
    client: the column that says who owns each row; partition: else how rows are spread, such as
        `cs.partition("dirichlet", clients=10, alpha=0.5)`.
    size, fit, grey: of pictures; normalise: of pictures and numbers; text, length, max_vocabulary, ngram_features,
        encoder: of texts, as in the data set `text_table`.
    test_fraction, seed: of test rows that are drawn, where there is no split test.
    """
    if isinstance(data, (str, Path)):
        data = open_hub(str(data), None)
    parts, tests, owners, names = _arranged(data, client)
    if owners is None and partition is None:
        raise Invalid(
            "the rows have no clients: give client=, the column that names them, or partition=cs.partition(...)"
        )
    if owners is not None and partition is not None and client is None:
        raise Invalid("partition is for one data set, and here is one for each client: leave it out")
    found = [*parts, *tests]
    if not sum(map(len, found)):
        raise Invalid("data has no rows")
    given = sum(len(part) for part in parts) if tests else None
    if x is None and not set(USUAL_INPUTS) & set(found[0].column_names):
        dataset = _table(parts, tests, label, client, names, test_fraction, seed)
    else:
        texts = TextFeatures(
            form=text, length=length, max_vocabulary=max_vocabulary, ngram_features=ngram_features, encoder=encoder
        )
        reading = HubReading(x=x, label=label, size=size, fit=fit, grey=grey, normalise=normalise, texts=texts)
        count = None if given is None else sum(len(part) for part in found) - given
        dataset = hub_set("data", found, count, reading, owners, names, (test_fraction, seed))
    chosen = partition if partition is not None else partition_named("natural")
    return federate(dataset, chosen, seed=seed)[0]


def _arranged(data: Any, client: str | None) -> tuple[list[Any], list[Any], np.ndarray | None, tuple[str, ...]]:
    """(training parts, test parts, the owner of every row or None, the owners' names)."""
    if isinstance(data, (list, tuple)):
        data = {str(k): part for k, part in enumerate(data)}
    if hasattr(data, "column_names") and not isinstance(data, Mapping):
        parts, tests = [data], []
    elif isinstance(data, Mapping) and "train" in data and set(data) <= set(SPLITS):
        parts, tests = [data["train"]], [data["test"]] if "test" in data else []
    elif isinstance(data, Mapping) and data:
        if client is not None:
            raise Invalid(f"client = {client!r} is for one data set, and here is one for each client: leave it out")
        for name, part in data.items():
            if not hasattr(part, "column_names"):
                raise Invalid(f"client {name!r} is {type(part).__name__}: it must be a Dataset of Hugging Face")
        _same_columns(data)
        sizes = [len(part) for part in data.values()]
        return list(data.values()), [], np.repeat(np.arange(len(sizes)), sizes), tuple(str(name) for name in data)
    else:
        kind = type(data).__name__
        raise Invalid(f"data is {kind}: give a Dataset, a DatasetDict, a dict of one per client, or a folder")
    if client is None:
        return parts, tests, None, ()
    for part in (*parts, *tests):
        if client not in part.column_names:
            hint = nearest(client, part.column_names)
            raise Invalid(f"the data have no column {client!r}{hint}; they have {', '.join(part.column_names)}")
    cells = [value for part in (*parts, *tests) for value in part[client]]
    gap = next((row for row, cell in enumerate(cells) if cell is None or cell == ""), None)
    if gap is not None:
        raise Invalid(f"data: row {gap} names no client in the column {client!r}: fill it in")
    owners, names = number_names([str(cell) for cell in cells], where="data")
    return parts, tests, owners, names


def _same_columns(data: Mapping[str, Any]) -> None:
    first = next(iter(data))
    for name, part in data.items():
        odd = set(part.column_names) ^ set(data[first].column_names)
        if odd:
            raise Invalid(f"clients {first!r} and {name!r} differ in the columns {', '.join(sorted(odd))}")


def _table(
    parts: list[Any],
    tests: list[Any],
    label: str | None,
    client: str | None,
    names: tuple[str, ...],
    fraction: float,
    seed: int,
) -> Dataset:
    """A federation of columns of numbers and text; class numbers are replaced by the data set's class names."""
    if label is None:
        raise Invalid(f"say which column is to be predicted, label=...; there are {', '.join(parts[0].column_names)}")
    if client is None and not names:
        raise Invalid("a table without a column client needs one frame for each client: see cs.from_frames")
    by_client = client is None
    frames = {name: _named(part, label) for name, part in zip(names, parts)} if by_client else _named(parts[0], label)
    test = _named(tests[0], label) if tests else None
    return frames_dataset(frames, label, client=client, test=test, test_fraction=fraction, seed=seed)


class _named:
    """A data set whose label column holds class names instead of class numbers."""

    def __init__(self, data: Any, label: str) -> None:
        self.column_names = list(data.column_names)
        self._data, self._label = data, label
        self._classes = getattr((getattr(data, "features", None) or {}).get(label), "names", None)

    def __getitem__(self, name: str) -> list[Any]:
        values = list(self._data[name])
        return [self._classes[value] for value in values] if name == self._label and self._classes else values
