"""Table rows with their owners, up to the finished data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from consilience.core.settings import Invalid
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.columns import encode_columns
from consilience.data.datasets.prepare.labels import kept_groups, number_names
from consilience.data.datasets.prepare.splits import given_or_held_out

Target = Literal["classes", "number"]


@dataclass(frozen=True, kw_only=True)
class OwnedRows:
    """Feature columns, labels and owners as text; the first `given` rows train (None: test rows are drawn)."""

    where: Path
    columns: dict[str, list[str]]
    labels: list[str]
    owners: list[str]
    given: int | None = None
    weights: list[str] | None = None  # of the rows in the loss

    def with_at_least(self, rows: int) -> OwnedRows:
        """Without the owners of fewer rows."""
        if rows <= 1:
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
    """The data set of a table's rows; everything learnt from data (medians, categories) is from training rows."""
    owners, group_names = number_names(rows.owners, where=rows.where)
    if target == "classes":
        labels, names = number_names(rows.labels, where=rows.where)
    else:
        labels, names = _numbers(rows.labels, "target", rows.where), ()
    strata = labels if target == "classes" else np.zeros(len(labels))
    train, test = given_or_held_out(strata, given=rows.given, fraction=split[0], seed=split[1], groups=owners)
    features = encode_columns(rows.columns, train, categorical=categorical, standardise=standardise, where=rows.where)
    return assemble(
        name,
        (features.values[train], labels[train]),
        (features.values[test], labels[test]),
        classes=len(names) if target == "classes" else None,
        groups=owners[train],
        test_groups=owners[test],
        group_names=group_names,
        label_names=label_names or names,
        feature_names=features.names,
        weights=None if rows.weights is None else _numbers(rows.weights, "weight", rows.where)[train],
    )


def _numbers(cells: Sequence[str], what: str, where: Path) -> np.ndarray:
    try:
        return np.array([float(cell) for cell in cells], np.float32)
    except ValueError as problem:
        raise Invalid(f"{where}: a {what} is not a number ({problem})") from problem
