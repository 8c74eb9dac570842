"""Natural federations in tables: one with a client column, and the four hospitals of Heart Disease."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np

from consilience.core.settings import Count, Invalid, OnlyWith, Whole
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.column_mistakes import refuse_repeated
from consilience.data.datasets.prepare.owned_rows import OwnedRows, Target, table_set
from consilience.data.datasets.prepare.splits import HeldOut
from consilience.data.readers.files import chosen_file, source
from consilience.data.readers.npz import read_npz
from consilience.data.readers.tables import FileTable, read_table

HOW = (
    "It is a .csv or .tsv (.gz) file whose first row names the columns, a .parquet file, or an .npz with one array per "
    "column."
)
HEART_HOME = (
    "Its home is https://archive.ics.uci.edu/dataset/45/heart+disease; the .csv form has the header row "
    "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num."
)
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
MEASUREMENTS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
NEVER_ZERO = ("trestbps", "chol")  # a living patient's blood pressure and cholesterol: 0 means not measured


def table(
    *,
    file: str,
    label: str,
    client: str | None = None,
    test: str | None = None,
    columns: tuple[str, ...] = (),
    categorical: tuple[str, ...] | None = None,
    target: Target = "classes",
    weight: str | None = None,
    min_client_rows: Count = 1,
    standardise: bool = True,
    test_fraction: Annotated[HeldOut, OnlyWith("test", (None,))] = 0.2,
    seed: Whole = 0,
    data_dir: str | Path | None = None,
) -> Dataset:
    """One table whose `client` column says who owns each row: a federation of hospitals, people or shops.

    Without `client`, a partition other than `natural` spreads the rows.
    `columns` are the features (default: all others); text columns become one-hot, gaps are filled with the
    training median and marked. `target` "number" makes it regression. `test` names a second table. `weight` names a
    column with the weight of each row in the loss.
    """
    refuse_repeated(columns, label, weight)
    if client == label:
        raise Invalid(f"client and label both name the column {label!r}: name the column to predict with label")
    tables = [_read(chosen_file(name, data_dir, how=HOW)) for name in (file, test) if name is not None]
    chosen = columns or tuple(name for name in tables[0].columns if name not in (client, label, weight))
    rows = OwnedRows(
        where=tables[0].path,
        columns={name: [cell for part in tables for cell in part.column(name)] for name in chosen},
        labels=[cell.strip() for part in tables for cell in part.column(label)],
        owners=[] if client is None else [owner for part in tables for owner in _owners(part, client)],
        given=len(tables[0]) if test else None,
        weights=None if weight is None else [cell for part in tables for cell in part.column(weight)],
    )
    return table_set(
        tables[0].path.name.split(".")[0],
        rows.with_at_least(min_client_rows),
        categorical=categorical,
        target=target,
        standardise=standardise,
        split=(test_fraction, seed),
    )


def _owners(part: FileTable, client: str) -> list[str]:
    owners = [cell.strip() for cell in part.column(client)]
    if "" in owners:
        raise Invalid(f"{part.path}: row {owners.index('')} names no client in the column {client!r}: fill it in")
    return owners


def heart_disease(
    *,
    zero_is_missing: bool = True,
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
    data_dir: str | Path | None = None,
) -> Dataset:
    """920 patients of four hospitals, 13 measurements with gaps, heart disease or none (UCI, Detrano et al. 1989).

    Gaps are filled with the training median and marked by columns of their own; `zero_is_missing` counts a
    blood pressure or cholesterol of 0 as a gap.
    """
    forms = {
        "csv": [f"{hospital}.csv" for hospital in HOSPITALS],
        "release": [f"processed.{hospital}.data" for hospital in HOSPITALS],  # has no header row
    }
    form, paths = source("heart_disease", data_dir, how=HEART_HOME).locate(forms)
    tables = [read_table(path, header=() if form == "csv" else (*MEASUREMENTS, "num")) for path in paths]
    columns = {name: [cell for part in tables for cell in part.column(name)] for name in MEASUREMENTS}
    if zero_is_missing:
        for name in NEVER_ZERO:
            columns[name] = ["" if cell.strip() in ("0", "0.0") else cell for cell in columns[name]]
    rows = OwnedRows(
        where=paths[0].parent,
        columns=columns,
        labels=[_diagnosis(part, row) for part in tables for row in range(len(part))],
        owners=[hospital for hospital, part in zip(HOSPITALS, tables) for _ in range(len(part))],
    )
    return table_set(
        "heart_disease",
        rows,
        categorical=(),
        split=(test_fraction, seed),
        label_names=("no disease", "disease"),
    )


def _diagnosis(part: FileTable, row: int) -> str:
    """num 0 is no disease, 1 to 4 are degrees of it."""
    cell = part.column("num")[row].strip()
    if cell not in ("0", "1", "2", "3", "4"):
        raise Invalid(f"{part.path}, row {row}: num is {cell!r}, not 0 .. 4")
    return "0" if cell == "0" else "1"


def _read(path: Path) -> FileTable:
    """A table from text, or from an archive whose arrays [N] and [N, D] are its columns."""
    if path.suffix != ".npz":
        return read_table(path)
    columns: dict[str, list[str]] = {}
    for name, array in read_npz(path).items():
        if array.ndim == 1:
            columns[name] = array.astype(str).tolist()
        elif array.ndim == 2:
            columns.update({f"{name}_{k}": array[:, k].astype(str).tolist() for k in range(array.shape[1])})
        else:
            raise Invalid(f"{path}: array {name!r} of shape {array.shape} is not a column of a table")
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1 or not np.all(list(lengths.values())):
        raise Invalid(f"{path}: its columns must have equal lengths above 0, not {lengths}")
    return FileTable(path=path, columns=columns)
