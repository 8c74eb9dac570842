"""Labels to class numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from consilience.core.class_names import sorted_names
from consilience.core.settings import Invalid


def class_numbers(labels: np.ndarray, *, rows: int, classes: int, where: Path | str) -> np.ndarray:
    """Labels [N] or [N, 1] as int64, one for each of `rows` pictures and all in 0 .. classes - 1."""
    if labels.dtype.kind not in "iub":
        named = ": number them, names, y = np.unique(y, return_inverse=True)" if labels.dtype.kind in "US" else ""
        raise Invalid(f"{where}: labels must be whole numbers, not {'text' if named else labels.dtype}{named}")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or len(labels) != rows:
        raise Invalid(f"{where}: {rows} rows of features but labels of shape {labels.shape}: one each is needed")
    labels = labels.astype(np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise Invalid(f"{where}: label {labels[wrong[0]]} of row {wrong[0]} is not in 0 .. {classes - 1}")
    return labels


def number_names(
    names: Sequence[str], *, where: Path | str, known: Sequence[str] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Names as numbers: their place among the `known` ones, or among the sorted distinct ones (2 before 10)."""
    known = tuple(known) if known is not None else sorted_names(names)
    number = {name: index for index, name in enumerate(known)}
    unknown = next((row for row, name in enumerate(names) if name not in number), None)
    if unknown is not None:
        shown = ", ".join(known[:10]) + (" ..." if len(known) > 10 else "")
        raise Invalid(f"{where}: {names[unknown]!r} of row {unknown} is not one of {shown}")
    return np.array([number[name] for name in names], np.int64), known


def kept_groups(owners: np.ndarray, least: int, *, where: Path | str) -> np.ndarray:
    """The rows whose owner has at least `least` of them."""
    sizes = np.bincount(owners)
    kept = np.flatnonzero(sizes[owners] >= least)
    if len(kept) == 0:
        raise Invalid(f"{where}: no group has {least} rows; the largest has {sizes.max()}")
    return kept
