"""A folder with one .npz or .csv file per client (hospital, shop or person)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from consilience.core.settings import Invalid, Whole
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.assemble import assemble
from consilience.data.datasets.prepare.column_mistakes import refuse_repeated
from consilience.data.datasets.prepare.features import Scaling, scale_features
from consilience.data.datasets.prepare.owned_rows import OwnedRows, Target, table_set
from consilience.data.datasets.prepare.pairs import read_pairs
from consilience.data.datasets.prepare.splits import HeldOut, held_out
from consilience.data.readers.files import chosen_source
from consilience.data.readers.tables import FileTable, read_table

HOW = (
    "It should hold one file per client (hospital_a.csv, hospital_b.csv ... or .tsv, .csv.gz, .parquet, .npz), "
    "or such files in its folders train and test."
)
Owned = tuple[np.ndarray, np.ndarray, np.ndarray]  # features, labels, owners
TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")


def client_files(
    *,
    folder: str,
    label: str = "label",
    normalise: Scaling = "standard",
    columns: tuple[str, ...] = (),
    categorical: tuple[str, ...] | None = None,
    target: Target = "classes",
    weight: str | None = None,
    test_fraction: HeldOut = 0.2,
    seed: Whole = 0,
    data_dir: str | Path | None = None,
) -> Dataset:
    """One client per file, named after the file; test rows are those of `test/`, of the .npz, or drawn per client.

    Tables need the column `label`; `columns` are the features (default: all others), as in `table`, and `weight` may
    name a column with the weight of each row in the loss. Archives hold x and y, or x_train, y_train, x_test, y_test.
    """
    refuse_repeated(columns, label, weight)
    place = chosen_source(folder, data_dir, how=HOW)
    top = place.places[0]
    nested = (top / "train").is_dir() and (top / "test").is_dir()
    train = _files(top / "train" if nested else top)
    test = _files(top / "test") if nested else {}
    strangers = test.keys() - train.keys()
    if strangers:
        raise Invalid(f"{top / 'test'} has {min(strangers)!r}, for which {top / 'train'} has no file")
    kinds = {path.suffix == ".npz" for path in (*train.values(), *test.values())}
    if len(kinds) > 1:
        raise Invalid(f"{top} mixes .npz files with tables: keep one kind")
    if kinds == {True}:
        if columns:
            raise Invalid(
                f"columns = {list(columns)} chooses columns of tables, and {top} holds .npz files: leave it out"
            )
        return _archive_clients(place.name, train, test, normalise, (test_fraction, seed))
    rows = _table_rows(top, train, test, label, columns, weight)
    return table_set(
        place.name,
        rows,
        categorical=categorical,
        target=target,
        standardise=normalise == "standard",
        split=(test_fraction, seed),
    )


def _files(folder: Path) -> dict[str, Path]:
    """Client name -> file, in name order; other files (a README) are ignored."""
    paths = sorted(path for path in folder.iterdir() if path.name.endswith((*TABLES, ".npz")) and path.name[0] != ".")
    if not paths:
        raise FileNotFoundError(f"{folder} holds no client files. {HOW}")
    named: dict[str, Path] = {}
    for path in paths:
        name = path.name.split(".")[0]
        if name in named:
            raise Invalid(f"{path} and {named[name]} are both client {name!r}: keep one")
        named[name] = path
    return named


def _table_rows(
    top: Path,
    train: dict[str, Path],
    test: dict[str, Path],
    label: str,
    columns: tuple[str, ...],
    weight: str | None,
) -> OwnedRows:
    """All clients' rows, training files first; every file must have the columns of the first."""
    tables = [(name, read_table(path)) for files in (train, test) for name, path in files.items()]
    first = tables[0][1]
    for _, part in tables:
        _same_columns(first, part)
    first.column(label)
    return OwnedRows(
        where=top,
        columns={
            column: [cell for _, part in tables for cell in part.column(column)]
            for column in columns or [name for name in first.columns if name not in (label, weight)]
        },
        labels=[cell.strip() for _, part in tables for cell in part.column(label)],
        owners=[name for name, part in tables for _ in range(len(part))],
        given=sum(len(part) for _, part in tables[: len(train)]) if test else None,
        weights=None if weight is None else [cell for _, part in tables for cell in part.column(weight)],
    )


def _same_columns(first: FileTable, part: FileTable) -> None:
    differing = first.columns.keys() ^ part.columns.keys()
    if differing:
        raise Invalid(f"{part.path} and {first.path} differ in the columns {', '.join(sorted(differing))}")


def _archive_clients(
    name: str, train: dict[str, Path], test: dict[str, Path], normalise: Scaling, split: tuple[float, int]
) -> Dataset:
    """Clients whose features are arrays, all of one shape."""
    parts: dict[str, list[Owned]] = {"train": [], "test": []}
    for number, (client, path) in enumerate(train.items()):
        pairs = read_pairs(path)
        if client in test:
            pairs["test"] = read_pairs(test[client])["train"]
        for part, (x, y) in pairs.items():
            _same_rows(path, x, parts["train"][0][0] if parts["train"] else x)
            parts[part].append((x, y, np.full(len(y), number)))
    x, y, owners = _join(parts["train"])
    if parts["test"]:
        test_x, test_y, test_owners = _join(parts["test"])
    else:
        rows, test_rows = held_out(y, fraction=split[0], seed=split[1], groups=owners)
        test_x, test_y, test_owners = x[test_rows], y[test_rows], owners[test_rows]
        x, y, owners = x[rows], y[rows], owners[rows]
    features, test_features = scale_features(x, test_x, normalise, where=name)
    return assemble(
        name,
        (features, y),
        (test_features, test_y),
        classes=1 + int(max(y.max(initial=0), test_y.max(initial=0))),
        groups=owners,
        test_groups=test_owners,
        group_names=tuple(train),
    )


def _same_rows(path: Path, x: np.ndarray, first: np.ndarray) -> None:
    if x.shape[1:] != first.shape[1:] or (x.dtype == np.uint8) != (first.dtype == np.uint8):
        raise Invalid(
            f"{path} has rows of {x.dtype} {x.shape[1:]} where other clients have {first.dtype} {first.shape[1:]}"
        )


def _join(entries: list[Owned]) -> Owned:
    """Features, labels and owners of all clients, concatenated."""
    x, y, owners = (np.concatenate(values) for values in zip(*entries))
    return x, y, owners
