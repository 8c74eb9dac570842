"""Several tables as one: cells, classes by the names that training rows have, and owners."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from consilience.core.settings import Invalid
from consilience.data.datasets.prepare.column_mistakes import refuse_no_classes
from consilience.data.datasets.prepare.labels import number_names
from consilience.data.readers.tables import FileTable


def cells(tables: Sequence[FileTable], name: str) -> list[str]:
    """One column of all tables."""
    return [cell for table in tables for cell in table.column(name)]


def places(tables: Sequence[FileTable]) -> list[tuple[Path, int]]:
    """File and row number of every row, for messages."""
    return [(table.path, row) for table in tables for row in range(len(table))]


def classes(tables: Sequence[FileTable], name: str, *, training: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Class numbers of all rows; the classes are those of the first `training` tables, and others are refused."""
    for table in tables:
        empty = next((row for row, cell in enumerate(table.column(name)) if not cell.strip()), None)
        if empty is not None:
            raise Invalid(f"{table.path}, row {empty} has no {name}: fill it in or remove the row")
    labels = [cell.strip() for cell in cells(tables[:training], name)]
    known = number_names(labels, where=tables[0].path)[1]
    refuse_no_classes(labels, known, tables[0].path)
    numbers = [
        number_names([cell.strip() for cell in table.column(name)], where=table.path, known=known)[0]
        for table in tables
    ]
    return np.concatenate(numbers), known


def owners(tables: Sequence[FileTable], name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """The natural client of every row, as numbers, and their names; a row without one is refused."""
    for table in tables:
        empty = next((row for row, cell in enumerate(table.column(name)) if not cell.strip()), None)
        if empty is not None:
            raise Invalid(f"{table.path}, row {empty} names no client in the column {name!r}: fill it in")
    return number_names([cell.strip() for cell in cells(tables, name)], where=tables[0].path)
