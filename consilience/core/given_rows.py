"""A client's rows as users give them: tensors, arrays, lists, a PyTorch data set or a data loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate

from consilience.core.class_names import are_names
from consilience.core.settings import Invalid

_AT_ONCE = 256  # rows of a data set that are stacked at a time

_TARGETS = ("label", "labels", "target", "targets", "y")  # target keys of rows that are dicts

PAIR = "a pair (x, y) of tensors or arrays, a torch.utils.data.Dataset or a DataLoader"


def named_clients(clients: Any, names: Sequence[str]) -> tuple[list[Any], tuple[str, ...]]:
    """(clients in order, their names), from a list or from a dict by name."""
    if isinstance(clients, Iterator):
        clients = list(clients)
    if isinstance(clients, Mapping):
        if names:
            raise Invalid("names is given beside clients by name: leave it out")
        return list(clients.values()), tuple(str(name) for name in clients)
    if isinstance(clients, (str, bytes, Tensor, np.ndarray)) or not isinstance(clients, Sequence):
        kind = type(clients).__name__
        if _reader(clients):
            raise Invalid(f"clients is one table ({kind}): {_reader(clients)}(table, label=..., client=...) splits it")
        raise Invalid(f"clients is one {kind}: give a list of clients, or a dict by name, each {PAIR}")
    if len(clients) == 2 and all(isinstance(part, (Tensor, np.ndarray)) for part in clients):
        raise Invalid(f"clients is one pair (x, y): give a list of clients, [(x, y), ...], each {PAIR}")
    return list(clients), tuple(names)


def _reader(given: Any) -> str:
    """The function that reads a table with named columns; empty for anything else."""
    if hasattr(given, "column_names"):
        return "cs.from_hugging_face"
    return "cs.from_frames" if hasattr(given, "columns") else ""


def rows_of(client: Any, who: str) -> tuple[Any, ...]:
    """(x, y) or (x, y, weights) as tensors; class names are unchanged; errors name the client."""
    if isinstance(client, DataLoader):
        return _of_loader(client, who)
    if isinstance(client, Dataset):
        return _of_dataset(client, who)
    if _reader(client):
        raise Invalid(
            f"{who} is a table ({type(client).__name__}): {_reader(client)}(clients, label=...) reads its columns"
        )
    if not isinstance(client, (tuple, list)) or not 2 <= len(client) <= 3:
        raise Invalid(f"{who} is {_kind(client)}: it must be {PAIR}")
    x, y, *weights = client
    if y is None:
        raise Invalid(f"{who} has no targets, y is None: leave the client out, or label its rows")
    return _features(x, who), _targets(y, who), *(_array(weight, f"{who}, weights") for weight in weights)


def _features(x: Any, who: str) -> Any:
    if isinstance(x, Mapping):
        return {str(name): _features(part, f"{who}, {name!r}") for name, part in x.items()}
    return _array(x, f"{who}, x")


def _targets(y: Any, who: str) -> Any:
    if hasattr(y, "to_numpy"):  # a pandas series
        y = y.to_numpy()
    if are_names(y):
        kinds = {type(name) for name in np.asarray(y, dtype=object).reshape(-1)}
        if not all(issubclass(kind, str) for kind in kinds):
            raise Invalid(
                f"{who}, y mixes {', '.join(sorted(k.__name__ for k in kinds))}: make all targets of one type"
            )
        return y
    found = _array(y, f"{who}, y")
    kept = isinstance(y, Tensor) and found.dtype not in (torch.int8, torch.int16, torch.int32)  # no loss reads these
    return found if kept or found.is_floating_point() else found.to(torch.int64)


def _array(values: Any, who: str) -> Tensor:
    """Tensors unchanged; other numbers as the default float type or int64."""
    if isinstance(values, Tensor):
        return values
    if hasattr(values, "dtypes") and hasattr(values, "columns"):  # a pandas frame of numbers
        wrong = [
            str(name) for name, kind in zip(values.columns, values.dtypes) if getattr(kind, "kind", "O") not in "biuf"
        ]
        if wrong:
            raise Invalid(
                f"{who}: the column {wrong[0]!r} holds no numbers: cs.from_frames encodes columns, or drop it"
            )
    try:
        array = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
    except ValueError as problem:
        raise Invalid(f"{who}: rows have different lengths ({problem}): make them equal") from problem
    if array.dtype.kind not in "biuf":
        raise Invalid(f"{who} holds {array.dtype} where numbers are needed: encode texts first, or see cs.from_frames")
    if array.ndim == 0:
        raise Invalid(f"{who} is a single number: it must hold one row for each target")
    array = np.ascontiguousarray(array)
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if tensor.is_floating_point():
        return tensor.to(torch.get_default_dtype())
    return tensor if tensor.dtype in (torch.uint8, torch.bool) else tensor.to(torch.int64)


def _of_dataset(data: Dataset[Any], who: str) -> tuple[Any, ...]:
    """All rows of a data set, in order."""
    if isinstance(data, IterableDataset):
        return _joined([default_collate([row]) for row in data], who)
    if not hasattr(data, "__len__"):
        raise Invalid(f"{who} is a {type(data).__name__} without a length: give it __len__")
    count = len(data)
    pieces = []
    for start in range(0, count, _AT_ONCE):
        rows = _read(data, range(start, min(start + _AT_ONCE, count)), who)
        try:
            pieces.append(default_collate(rows))
        except (TypeError, RuntimeError) as problem:
            raise Invalid(
                f"{who}: rows {start} to {start + len(rows) - 1} of {type(data).__name__} cannot be put together "
                f"({str(problem).partition(chr(10))[0]}): give them one shape, as tensors, by its transform"
            ) from problem
    return _joined(pieces, who)


def _read(data: Dataset[Any], numbers: range, who: str) -> list[Any]:
    found = []
    for row in numbers:
        try:
            found.append(data[row])
        except Exception as problem:
            kind = type(problem).__name__
            raise Invalid(f"{who}: row {row} of {type(data).__name__} cannot be read ({kind}: {problem})") from problem
    return found


def _of_loader(loader: DataLoader[Any], who: str) -> tuple[Any, ...]:
    """All rows of a loader; a shuffling loader is read in data set order, so that runs are reproducible."""
    if isinstance(loader.sampler, (RandomSampler, SequentialSampler)) and loader.batch_size is not None:
        plain = getattr(loader.sampler, "num_samples", None) in (None, len(loader.dataset))  # type: ignore[arg-type]
        if plain:
            options: dict[str, Any] = {"batch_size": loader.batch_size, "collate_fn": loader.collate_fn}
            loader = DataLoader(loader.dataset, **options)
    return _joined(list(loader), who)


def _joined(pieces: list[Any], who: str) -> tuple[Any, ...]:
    """Batches (x, y), concatenated."""
    if not pieces:
        raise Invalid(f"{who} has no rows: leave it out, or give it data")
    pieces = [_pair(piece, who) for piece in pieces]
    x = [_features(piece[0], who) for piece in pieces]
    targets = [_targets(piece[1], who) for piece in pieces]
    features = {k: torch.cat([part[k] for part in x]) for k in x[0]} if isinstance(x[0], dict) else torch.cat(x)
    if isinstance(targets[0], Tensor):
        return features, torch.cat(targets)
    return features, [name for part in targets for name in part]


def _pair(piece: Any, who: str) -> tuple[Any, Any]:
    """(x, y) of a batch; of a dict (Hugging Face), y is the target key and x all other keys."""
    if isinstance(piece, (tuple, list)) and len(piece) == 2:
        return piece[0], piece[1]
    if not isinstance(piece, Mapping):
        raise Invalid(f"{who}: a row must be a pair (x, y), not {_kind(piece)}")
    named = [name for name in _TARGETS if name in piece]
    if len(named) != 1 or len(piece) < 2:
        raise Invalid(
            f"{who}: a row is a dict of {', '.join(map(str, piece))}: give one of its entries the name "
            f"'label', or make rows pairs (x, y)"
        )
    x = {name: part for name, part in piece.items() if name != named[0]}
    return (x if len(x) > 1 else next(iter(x.values()))), piece[named[0]]


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
