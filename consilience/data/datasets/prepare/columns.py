"""Table columns to features: numbers standardised, gaps filled and marked, categories one-hot.

Not built on scikit-learn's encoders, because an error must name the file, column and row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from consilience.core.class_names import sorted_names
from consilience.core.settings import Invalid
from consilience.data.datasets.prepare.column_mistakes import mistaken_texts, refuse_unknown_categorical

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})


@dataclass(frozen=True, kw_only=True)
class OwnedPlace:
    """Where rows come from, with the client that owns each, so that an error can name it."""

    place: Path | str
    owners: Sequence[str]

    def __str__(self) -> str:
        return str(self.place)


Where = Path | str | OwnedPlace


@dataclass(frozen=True, kw_only=True)
class Features:
    """A matrix [N, D] float32 and the name of each of its columns."""

    values: np.ndarray
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Column:
    """How one column becomes features: `categories` one-hot, or a number (x - mean) / deviation with gaps filled."""

    name: str
    categories: tuple[str, ...] | None
    median: float = 0.0
    mean: float = 0.0
    deviation: float = 1.0
    marks_gaps: bool = False

    def names(self) -> list[str]:
        """Of its features."""
        return [self.name] if self.categories is None else [f"{self.name}={value}" for value in self.categories]

    def values(self, cells: Sequence[str], missing: np.ndarray, where: Where) -> list[np.ndarray]:
        """Its features, each [N]; a value that is not a number is refused where numbers are expected."""
        if self.categories is not None:
            return [np.array([cell == value for cell in cells], np.float64) for value in self.categories]
        numbers = _numbers(cells, missing)
        if numbers is None:
            _refuse_text(self.name, cells, missing, where, "the model was trained on numbers there")
        assert numbers is not None
        _refuse_infinite(self.name, numbers, missing, where)
        filled = np.where(np.isnan(numbers), self.median, numbers)
        return [(filled - self.mean) / self.deviation]


@dataclass(frozen=True, kw_only=True)
class ColumnEncoding:
    """How the columns of a table become features, learnt from training rows; new rows are encoded in the same way."""

    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the features: the columns', then those of the missing-value indicators."""
        marks = [f"{column.name} missing" for column in self.columns if column.marks_gaps]
        return (*(name for column in self.columns for name in column.names()), *marks)

    def __call__(self, columns: Mapping[str, Sequence[str]], where: Where) -> np.ndarray:
        """Rows [N, D] float32 of columns that have all these names."""
        blocks: list[np.ndarray] = []
        marks: list[np.ndarray] = []
        for column in self.columns:
            cells, missing = cells_of(columns[column.name])
            blocks += column.values(cells, missing, where)
            if column.marks_gaps:
                marks.append(missing.astype(np.float64))
        return np.stack([*blocks, *marks], axis=1).astype(np.float32)


def encode_columns(
    columns: Mapping[str, Sequence[str]],
    training: np.ndarray,
    *,
    categorical: Sequence[str] | None = None,
    standardise: bool = True,
    where: Where,
) -> Features:
    """Features of all rows, with medians, statistics and categories learnt from the `training` rows only."""
    encoding = learn_encoding(columns, training, categorical=categorical, standardise=standardise, where=where)
    return Features(values=encoding(columns, where), names=encoding.names)


def learn_encoding(
    columns: Mapping[str, Sequence[str]],
    training: np.ndarray,
    *,
    categorical: Sequence[str] | None = None,
    standardise: bool = True,
    where: Where,
) -> ColumnEncoding:
    """How to encode columns: medians, statistics and categories of the `training` rows.

    A column with gaps anywhere gets one more column that marks them. `categorical` None: the columns
    with a value that is not a number, unless their texts are clearly no categories.
    """
    if not columns:
        raise Invalid(f"{where}: there are no feature columns left")
    refuse_unknown_categorical(categorical, columns)
    learnt = []
    for name, texts in columns.items():
        cells, missing = cells_of(texts)
        numbers = None if categorical and name in categorical else _numbers(cells, missing)
        marks = bool(missing.any())
        if numbers is None:
            if categorical is not None and name not in categorical:
                _refuse_text(name, cells, missing, where, "list it in categorical")
            if categorical is None:
                _refuse_mistaken(name, cells, missing, where)
            known = sorted_names([cells[row] for row in training if not missing[row]])
            learnt.append(Column(name=name, categories=known, marks_gaps=marks))
        else:
            _refuse_infinite(name, numbers, missing, where)
            learnt.append(_numeric(name, numbers, training, standardise, marks))
    return ColumnEncoding(columns=tuple(learnt))


def _numeric(name: str, numbers: np.ndarray, training: np.ndarray, standardise: bool, marks: bool) -> Column:
    """NaN becomes the training median (0 if none is known); then mean 0 and deviation 1 over training rows."""
    known = numbers[training][~np.isnan(numbers[training])]
    median = np.median(known) if len(known) else 0.0
    if not standardise:
        return Column(name=name, categories=None, median=float(median), marks_gaps=marks)
    filled = np.where(np.isnan(numbers), median, numbers)[training]
    mean, deviation = float(filled.mean(0)), float(filled.std(0))
    return Column(
        name=name,
        categories=None,
        median=float(median),
        mean=mean,
        deviation=deviation if deviation > 0 else 1.0,
        marks_gaps=marks,
    )


def cells_of(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """(the stripped cells, which of them are missing)."""
    cells = [text.strip() for text in texts]
    return cells, np.array([cell.lower() in MISSING for cell in cells], dtype=bool)


def standardised(values: np.ndarray, training: np.ndarray) -> np.ndarray:
    """Mean 0 and deviation 1 per column over the training rows; a constant column becomes 0."""
    mean, deviation = values[training].mean(0), values[training].std(0)
    return (values - mean) / np.where(deviation > 0, deviation, 1.0)


def _numbers(cells: Sequence[str], missing: np.ndarray) -> np.ndarray | None:
    try:
        return np.array([np.nan if gap else float(cell) for cell, gap in zip(cells, missing)])
    except ValueError:
        return None


def _refuse_text(name: str, cells: Sequence[str], missing: np.ndarray, where: Where, fix: str) -> None:
    for row, cell in enumerate(cells):
        if not missing[row] and _numbers([cell], missing[row : row + 1]) is None:
            place = row_named(row, where)
            raise Invalid(f"{where}: {cell!r} in column {name!r}, {place}, is not a number: {fix}")


def _refuse_mistaken(name: str, cells: Sequence[str], missing: np.ndarray, where: Where) -> None:
    """Refuse texts that would become one feature each, although they are clearly no categories."""
    found = mistaken_texts(cells, missing)
    if found is None:
        return
    place = "" if found.row is None else f", {row_named(found.row, where)},"
    fix = f"{found.fix}, or leave" if found.fix else "leave"
    raise Invalid(
        f"{where}: column {name!r}{place} {found.what}: {fix} the column out by listing the others in columns "
        "(text columns listed in categorical are used as they are)"
    )


def _refuse_infinite(name: str, numbers: np.ndarray, missing: np.ndarray, where: Where) -> None:
    wrong = np.flatnonzero(~(np.abs(numbers) <= np.finfo(np.float32).max) & ~missing)
    if len(wrong):
        place = row_named(int(wrong[0]), where)
        fix = "change its unit" if np.isfinite(numbers[wrong[0]]) else "leave unknown values empty"
        raise Invalid(f"{where}: column {name!r}, {place} is {numbers[wrong[0]]}: {fix}")


def row_named(row: int, where: Where) -> str:
    """'row 12', or 'row 3 of client b'."""
    if not isinstance(where, OwnedPlace):
        return f"row {row}"
    owner = where.owners[row]
    return f"row {sum(name == owner for name in where.owners[:row])} of client {owner!r}"
