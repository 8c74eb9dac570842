"""The last step of every data set: converts to tensors of the right type, checks them and makes a `Dataset`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.kind import Kind
from consilience.core.settings import Invalid
from consilience.core.stored_rows import is_stored
from consilience.data.dataset import Dataset, NewRows, Texts


def assemble(
    name: str,
    train: tuple[Any, Any],
    test: tuple[Any, Any],
    *,
    classes: int | None,
    groups: Any = None,
    test_groups: Any = None,
    group_names: tuple[str, ...] = (),
    label_names: tuple[str, ...] = (),
    vocabulary: tuple[str, ...] = (),
    feature_names: tuple[str, ...] = (),
    kind: Kind | None = None,
    weights: Any = None,
    read_rows: Callable[[Path], NewRows] | None = None,
) -> Dataset:
    """A `Dataset` of (x, y) pairs of arrays or tensors; `groups` hold each row's owner (a place in `group_names`)."""
    parts = []
    for part, (x, y), owners in (("training", train, groups), ("test", test, test_groups)):
        where = f"data set {name!r}, {part} part"
        whole = bool(classes) or (kind is not None and kind.yes_no)
        features, targets = tree.map_leaves(_features, x), _targets(y, whole)
        _check_rows(where, features, targets, classes, None if kind is None else kind.ignored)
        parts.append((features, targets, _owners(where, owners, len(targets), len(group_names))))
    return Dataset(
        name=name,
        x=parts[0][0],
        y=parts[0][1],
        test_x=parts[1][0],
        test_y=parts[1][1],
        classes=classes,
        groups=parts[0][2],
        test_groups=parts[1][2],
        group_names=group_names,
        label_names=label_names,
        vocabulary=vocabulary,
        feature_names=feature_names,
        kind=kind,
        weights=None if weights is None else torch.as_tensor(weights, dtype=torch.float32),
        read_rows=read_rows,
    )


def refuse_nonfinite(values: np.ndarray, where: Path | str) -> None:
    """Refuse NaN and infinite features, naming the file and the first bad row."""
    if values.dtype.kind == "f" and not np.isfinite(values.sum(dtype=np.float64)):
        wrong = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))
        if len(wrong):
            raise Invalid(f"{where}: row {wrong[0]} has NaN or infinite values ({len(wrong)} rows in all): clean them")


def _features(values: Any) -> Any:
    if isinstance(values, Texts) or is_stored(values):
        return values
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)


def _targets(values: Any, whole: bool) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return tensor.to(torch.int64 if whole else torch.float32)


def _check_rows(where: str, x: Any, y: Tensor, classes: int | None, ignored: int | None) -> None:
    if len(y) == 0:
        raise Invalid(f"{where} has no rows: give it more data or another test_fraction")
    for leaf in tree.leaves(x):
        if len(leaf) != len(y):
            raise Invalid(f"{where} has {len(leaf)} rows of features for {len(y)} targets: they must match")
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not is_stored(leaf):
            refuse_nonfinite(leaf.numpy(), where)
    if ignored is not None:
        y = y[y != ignored]
    if classes and y.numel() and (int(y.min()) < 0 or int(y.max()) >= classes):
        raise Invalid(f"{where} has labels {int(y.min())} .. {int(y.max())}, which are not in 0 .. {classes - 1}")
    refuse_nonfinite(y.numpy(), where)


def _owners(where: str, owners: Any, rows: int, names: int) -> Tensor | None:
    if owners is None:
        return None
    numbers = torch.as_tensor(owners, dtype=torch.int64)
    if len(numbers) != rows:
        raise Invalid(f"{where} has {rows} rows but groups for {len(numbers)}")
    if int(numbers.min()) < 0 or int(numbers.max()) >= names:
        raise Invalid(f"{where} has group numbers up to {int(numbers.max())} for {names} group names")
    return numbers
