"""Table columns to features: numbers standardised, gaps filled and marked, categories one-hot.

Written out rather than built from scikit-learn's encoders, because a refusal must name the file, column and row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from consilience.core.class_names import sorted_names
from consilience.core.settings import Invalid

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})


@dataclass(frozen=True, kw_only=True)
class Features:
    """A matrix [N, D] float32 and the name of each of its columns."""

    values: np.ndarray
    names: tuple[str, ...]


def encode_columns(
    columns: Mapping[str, Sequence[str]],
    training: np.ndarray,
    *,
    categorical: Sequence[str] | None = None,
    standardise: bool = True,
    where: Path | str,
) -> Features:
    """Features of all rows, with medians, statistics and categories learnt from the `training` rows only.

    A column with gaps anywhere gets one more column that marks them. `categorical` None: the columns
    with a value that is not a number.
    """
    if not columns:
        raise Invalid(f"{where}: there are no feature columns left")
    blocks: list[np.ndarray] = []
    names: list[str] = []
    gaps: list[tuple[str, np.ndarray]] = []
    for name, texts in columns.items():
        cells = [text.strip() for text in texts]
        missing = np.array([cell.lower() in MISSING for cell in cells])
        numbers = None if categorical and name in categorical else _numbers(cells, missing)
        if numbers is None:
            if categorical is not None and name not in categorical:
                _refuse_text(name, cells, missing, where)
            known = sorted_names([cells[row] for row in training if not missing[row]])
            blocks += [np.array([cell == value for cell in cells], np.float64) for value in known]
            names += [f"{name}={value}" for value in known]
        else:
            _refuse_infinite(name, numbers, missing, where)
            blocks.append(fill_and_scale(numbers, training, standardise=standardise))
            names.append(name)
        if missing.any():
            gaps.append((f"{name} missing", missing.astype(np.float64)))
    blocks += [marks for _, marks in gaps]
    names += [name for name, _ in gaps]
    return Features(values=np.stack(blocks, axis=1).astype(np.float32), names=tuple(names))


def fill_and_scale(numbers: np.ndarray, training: np.ndarray, *, standardise: bool = True) -> np.ndarray:
    """NaN replaced by the training median (0 if none is known), then mean 0 and deviation 1 over training rows."""
    known = numbers[training][~np.isnan(numbers[training])]
    filled = np.where(np.isnan(numbers), np.median(known) if len(known) else 0.0, numbers)
    return standardised(filled, training) if standardise else filled


def standardised(values: np.ndarray, training: np.ndarray) -> np.ndarray:
    """Mean 0 and deviation 1 per column over the training rows; a constant column becomes 0."""
    mean, deviation = values[training].mean(0), values[training].std(0)
    return (values - mean) / np.where(deviation > 0, deviation, 1.0)


def _numbers(cells: Sequence[str], missing: np.ndarray) -> np.ndarray | None:
    try:
        return np.array([np.nan if gap else float(cell) for cell, gap in zip(cells, missing)])
    except ValueError:
        return None


def _refuse_text(name: str, cells: Sequence[str], missing: np.ndarray, where: Path | str) -> None:
    for row, cell in enumerate(cells):
        if not missing[row] and _numbers([cell], missing[row : row + 1]) is None:
            raise Invalid(f"{where}: {cell!r} in column {name!r}, row {row}, is not a number: list it in categorical")


def _refuse_infinite(name: str, numbers: np.ndarray, missing: np.ndarray, where: Path | str) -> None:
    wrong = np.flatnonzero(~np.isfinite(numbers) & ~missing)
    if len(wrong):
        raise Invalid(f"{where}: column {name!r}, row {wrong[0]} is {numbers[wrong[0]]}: leave unknown values empty")
