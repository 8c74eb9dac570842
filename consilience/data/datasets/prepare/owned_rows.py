"""Table rows with their owners, and the `Dataset` made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from consilience.core.settings import Invalid, nearest
from consilience.data.dataset import Dataset, NewRows
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.column_mistakes import refuse_no_classes
from consilience.data.datasets.prepare.columns import ColumnEncoding, OwnedPlace, Where, learn_encoding, row_named
from consilience.data.datasets.prepare.labels import kept_groups, number_names
from consilience.data.datasets.prepare.splits import given_or_held_out
from consilience.data.readers.tables import read_table

Target = Literal["classes", "number"]


@dataclass(frozen=True, kw_only=True)
class OwnedRows:
    """Feature columns, labels and owners as text; the first `given` rows train (None: test rows are drawn).

    Without owners there are no natural clients.
    """

    where: Path | str
    columns: dict[str, list[str]]
    labels: list[str]
    owners: list[str]
    given: int | None = None
    weights: list[str] | None = None  # of the rows in the loss

    def with_at_least(self, rows: int) -> OwnedRows:
        """Leave out owners with fewer rows."""
        if rows <= 1 or not self.owners:
            return self
        kept = kept_groups(number_names(self.owners, where=self.where)[0], rows, where=self.where)
        return OwnedRows(
            where=self.where,
            columns={name: [cells[row] for row in kept] for name, cells in self.columns.items()},
            labels=[self.labels[row] for row in kept],
            owners=[self.owners[row] for row in kept],
            given=None if self.given is None else int((kept < self.given).sum()),
            weights=None if self.weights is None else [self.weights[row] for row in kept],
        )


def table_set(
    name: str,
    rows: OwnedRows,
    *,
    categorical: Sequence[str] | None = None,
    target: Target = "classes",
    standardise: bool = True,
    split: tuple[float, int],
    label_names: tuple[str, ...] | None = None,
) -> Dataset:
    """The data set of a table's rows; medians and categories are learnt from the training rows only."""
    owned = bool(rows.owners)
    where: Where = OwnedPlace(place=rows.where, owners=rows.owners) if owned else rows.where
    owners, group_names = number_names(rows.owners, where=rows.where) if owned else (None, ())
    if target == "classes":
        _refuse_gaps(rows.labels, where)
        labels, names = number_names(rows.labels, where=rows.where)
        refuse_no_classes(rows.labels, names, where)
    else:
        labels, names = _numbers(rows.labels, "target", where), ()
    strata = labels if target == "classes" else np.zeros(len(labels))
    train, test = given_or_held_out(strata, given=rows.given, fraction=split[0], seed=split[1], groups=owners)
    encoding = learn_encoding(rows.columns, train, categorical=categorical, standardise=standardise, where=where)
    values = encoding(rows.columns, where)
    return assemble(
        name,
        (values[train], labels[train]),
        (values[test], labels[test]),
        classes=len(names) if target == "classes" else None,
        groups=None if owners is None else owners[train],
        test_groups=None if owners is None else owners[test],
        group_names=group_names,
        label_names=label_names or names,
        feature_names=encoding.names,
        weights=None if rows.weights is None else _numbers(rows.weights, "weight", where)[train],
        read_rows=TableRows(encoding=encoding),
    )


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """Reads rows of a new table as the training rows were read."""

    encoding: ColumnEncoding

    def __call__(self, path: Path) -> NewRows:
        """The rows of a csv, tsv or Parquet file; a missing column is an error, further columns are ignored."""
        table = read_table(path)
        wanted = [column.name for column in self.encoding.columns]
        absent = [name for name in wanted if name not in table.columns]
        if absent:
            hint = nearest(absent[0], table.columns)
            raise Invalid(
                f"{path} lacks {_columns(absent)}, which the model was trained on{hint}; it has "
                f"{', '.join(table.columns)}"
            )
        values = self.encoding(table.columns, path)
        names = tuple(str(row) for row in range(len(values)))
        return NewRows(
            x=torch.from_numpy(values), names=names, unused=tuple(n for n in table.columns if n not in wanted)
        )


def _columns(names: Sequence[str]) -> str:
    return f"the column {names[0]!r}" if len(names) == 1 else f"the columns {', '.join(map(repr, names))}"


def _refuse_gaps(labels: Sequence[str], where: Where) -> None:
    gap = next((row for row, label in enumerate(labels) if not label.strip()), None)
    if gap is not None:
        raise Invalid(f"{where}: {row_named(gap, where)} has no label: remove it, or give it one")


def _numbers(cells: Sequence[str], what: str, where: Where) -> np.ndarray:
    for row, cell in enumerate(cells):
        try:
            float(cell)
        except ValueError as problem:
            raise Invalid(f"{where}: the {what} {cell!r} of {row_named(row, where)} is not a number") from problem
    return np.array([float(cell) for cell in cells], np.float32)
