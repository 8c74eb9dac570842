"""Detects the contents of a user's files and which data set of the catalogue reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from consilience.core.settings import Invalid
from consilience.data.datasets.client_files import TABLES
from consilience.data.datasets.prepare.column_mistakes import FEW, mistaken_texts
from consilience.data.datasets.prepare.columns import cells_of
from consilience.data.datasets.prepare.pairs import read_pairs
from consilience.data.readers.leaf import read_leaf
from consilience.data.readers.npz import npz_names, read_npz
from consilience.data.readers.pictures import find_pictures
from consilience.data.readers.tables import FileTable, read_table

LABELS = ("label", "target", "outcome", "class", "y", "diagnosis", "category", "species", "intent", "sentiment")
CLIENTS = (
    *("client", "hospital", "site", "center", "centre", "institution", "clinic", "user", "device", "group"),
    *("shop", "store", "bank", "branch", "party", "silo", "owner", "subject", "region"),
)
WORDS = 3.0  # a column with at least this mean number of words is text
EXPECTED = (
    "consilience init reads a table (.csv, .tsv, .parquet) or .npz file; a folder with one such file per client, with "
    "pictures in class folders, with LEAF's train and test, or a data set saved by Hugging Face's save_to_disk"
)
Ask = Callable[[str, str, Sequence[str]], str]
"""(question, default, allowed answers) -> the answer; where "" is allowed, a user answers "none"."""


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    """The settings that read the files, and what was noticed about them."""

    data_dir: Path
    data: dict[str, Any]
    model: dict[str, Any]
    has_clients: bool
    regression: bool = False
    said: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class GivenSettings:
    """What the user has specified already; "" and None are guessed or asked for."""

    label: str = ""
    client: str | None = None  # "": no column
    target: str = ""
    test: str = ""


def look(path: Path, wishes: GivenSettings, ask: Ask) -> FileSettings:
    """Detect the contents of a file or folder; the error for an unsupported one lists what is supported."""
    if not path.exists():
        raise FileNotFoundError(f"{path} was not found. {EXPECTED}")
    if path.is_file():
        return _file(path, wishes, ask)
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _saved(path, wishes)
    folders = [path / name for name in ("train", "test")]
    nested = all(folder.is_dir() for folder in folders)
    if nested and any(folders[0].glob("*.json*")):
        return _leaf(path)
    if any(find_pictures(folder) for depth in ("*", "*/*") for folder in path.glob(depth) if folder.is_dir()):
        said = ["pictures in folders that name their classes"]
        data = {"name": "picture_folders", "folder": path.name, "size": 32}
        grouped = not nested and not any(find_pictures(folder) for folder in path.glob("*") if folder.is_dir())
        return FileSettings(data_dir=path.parent, data=data, model={"name": "cnn"}, has_clients=grouped, said=said)
    files = _tables(folders[0] if nested else path)
    if len(files) == 1 and not nested:
        return _file(files[0], wishes, ask)
    if files:
        return _client_files(path, files, wishes, ask)
    raise Invalid(f"{path} holds nothing that is recognised. {EXPECTED}")


def _tables(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.name.endswith((*TABLES, ".npz")) and not p.name.startswith("."))


def _file(path: Path, wishes: GivenSettings, ask: Ask) -> FileSettings:
    if path.suffix == ".npz":
        return _archive(path)
    if not path.name.endswith(TABLES):
        raise Invalid(f"{path} is not recognised. {EXPECTED}")
    table = read_table(path)
    said = [f"{path.name}: {len(table):,} rows, {len(table.columns)} columns"]
    guess = wishes.label or _named(table, LABELS) or list(table.columns)[-1]
    label = _column(table, wishes.label or ask("Column to predict", guess, list(table.columns)))
    owner = wishes.client
    if owner is None:
        owner = ask(
            "Column that names the clients (none: rows are spread)", _named(table, CLIENTS), [*table.columns, ""]
        )
    client = _column(table, owner) if owner else ""
    rest = [name for name in table.columns if name not in (label, client)]
    texts = [name for name in rest if _is_text(table.columns[name])]
    file: dict[str, Any] = {"test": wishes.test} if wishes.test else {}
    if texts and not any(_numeric(table.columns[name]) for name in rest):
        said.append(f"{texts[0]!r} holds texts")
        data = {"name": "text_table", "train": path.name, **file, "text": texts[0], "label": label}
        data |= {**({"group": client} if client else {}), "features": "ngrams"}
        model = {"name": "mlp", "hidden": [64]}
        return FileSettings(data_dir=path.parent, data=data, model=model, has_clients=bool(client), said=said)
    target = wishes.target or ask("Is it classes or a number", _target(table.columns[label]), ["classes", "number"])
    data = {"name": "table", "file": path.name, **file, "label": label, **({"client": client} if client else {})}
    data |= {**_without_keys(table.columns, rest, said), "target": target}
    return FileSettings(
        data_dir=path.parent,
        data=data,
        model={"name": "mlp", "hidden": [64]},
        has_clients=bool(client),
        regression=target == "number",
        said=[*said, *_about_label(label, table.columns[label], target)],
    )


def _client_files(path: Path, files: Sequence[Path], wishes: GivenSettings, ask: Ask) -> FileSettings:
    shown = ", ".join(file.name for file in files[:4]) + " ..." * (len(files) > 4)
    said = [f"{len(files)} files, one for each client: {shown}"]
    data: dict[str, Any] = {"name": "client_files", "folder": path.name}
    model = {"name": "mlp", "hidden": [64]}
    if wishes.client:
        raise Invalid(f"--client {wishes.client}: {path} has one file for each client, leave it out")
    if files[0].suffix == ".npz":
        return FileSettings(data_dir=path.parent, data=data, model=_array_model(files[0]), has_clients=True, said=said)
    tables = [read_table(file) for file in files]
    table = tables[0]
    guess = wishes.label or _named(table, LABELS) or list(table.columns)[-1]
    label = _column(table, wishes.label or ask("Column to predict", guess, list(table.columns)))
    whole = {name: [cell for part in tables for cell in part.columns.get(name, [])] for name in table.columns}
    cells = [cell for part in tables for cell in part.column(label)]
    target = wishes.target or ask("Is it classes or a number", _target(cells), ["classes", "number"])
    data |= {"label": label, **_without_keys(whole, [name for name in whole if name != label], said), "target": target}
    said += _about_label(label, cells, target)
    regression = target == "number"
    return FileSettings(
        data_dir=path.parent, data=data, model=model, has_clients=True, regression=regression, said=said
    )


def _archive(path: Path) -> FileSettings:
    read_pairs(path)  # raises for arrays of other names
    said = [f"{path.name}: the arrays {', '.join(npz_names(path))}"]
    data = {"name": "npz", "file": path.name}
    return FileSettings(data_dir=path.parent, data=data, model=_array_model(path), has_clients=False, said=said)


def _array_model(path: Path) -> dict[str, Any]:
    """A convolutional network for pictures, else a perceptron."""
    shapes = {name: array.shape for name, array in read_npz(path).items() if name.startswith(("x", "train_images"))}
    return {"name": "cnn"} if any(len(shape) > 2 for shape in shapes.values()) else {"name": "mlp", "hidden": [64]}


def _saved(path: Path, wishes: GivenSettings) -> FileSettings:
    data: dict[str, Any] = {"name": "hugging_face", "path": str(path), "text": "ngrams"}
    data |= {**({"label": wishes.label} if wishes.label else {}), **({"group": wishes.client} if wishes.client else {})}
    said = ["a data set that Hugging Face's datasets saved"]
    model = {"name": "mlp", "hidden": [64]}
    return FileSettings(data_dir=path.parent, data=data, model=model, has_clients=bool(wishes.client), said=said)


def _leaf(path: Path) -> FileSettings:
    user, x, _, file = next(read_leaf(path / "train"))
    first = x[0] if x else []
    model: dict[str, Any]
    if isinstance(first, str):
        task, model = "shakespeare", {"name": "char_lstm"}
    elif isinstance(first, list) and first and isinstance(first[-1], str):
        task, model = "sent140", {"name": "text_lstm"}
    elif isinstance(first, list) and len(first) == 28 * 28:
        task, model = "femnist", {"name": "cnn"}
    else:
        task, model = "features", {"name": "mlp", "hidden": [64]}
    said = [f"LEAF files ({file.name}: user {user!r} ...), which look like {task}"]
    data = {"name": "leaf", "folder": path.name, "task": task}
    return FileSettings(data_dir=path.parent, data=data, model=model, has_clients=True, said=said)


def _named(table: FileTable, usual: Sequence[str]) -> str:
    """The column with a usual name, or with a usual name among its words; "" if there is none."""
    for word in usual:
        for name in table.columns:
            if name.lower() == word:
                return name
    for word in usual:
        for name in table.columns:
            if len(word) > 1 and word in name.lower().replace("-", "_").split("_"):
                return name
    return ""


def _column(table: FileTable, name: str) -> str:
    table.column(name)  # raises if there is none
    return name


def _numeric(cells: Sequence[str]) -> bool:
    stripped, missing = cells_of(cells)
    try:
        return bool(np.isfinite([float(cell) for cell, gap in zip(stripped, missing) if not gap]).any())
    except ValueError:
        return False


def _is_text(cells: Sequence[str]) -> bool:
    some = [len(cell.split()) for cell in cells[:1000] if cell.strip()]
    return bool(some) and not _numeric(cells) and float(np.mean(some)) >= WORDS


def _without_keys(columns: Mapping[str, Sequence[str]], names: Sequence[str], said: list[str]) -> dict[str, list[str]]:
    """The option `columns` without those that identify a row or hold dates or notes, which is said; {}: all columns."""
    keys = [name for name in names if _is_key(name, columns[name])]
    others = {name: _no_feature(columns[name]) for name in names if name not in keys}
    left_out = [*keys, *(name for name, why in others.items() if why)]
    if not left_out or len(left_out) == len(names):
        return {}
    if keys:
        said.append(f"left out, because every row has a value of its own: {', '.join(keys)}")
    said += [f"left out: {name!r} {why}" for name, why in others.items() if why]
    return {"columns": [name for name in names if name not in left_out]}


def _no_feature(cells: Sequence[str]) -> str:
    """Why a column of texts is left out; "" for numbers, categories, and columns with a mistake to correct."""
    stripped, missing = cells_of(cells)
    if _numeric(cells) or missing.all():
        return ""
    why = mistaken_texts(stripped, missing)
    return why.what if why is not None and why.no_feature else ""


def _is_key(name: str, cells: Sequence[str]) -> bool:
    """Whether a column identifies its row: text that never repeats, or whole numbers in a column called id."""
    if len(cells) < 3 or len(set(cells)) < len(cells):
        return False
    words = name.lower().replace("-", "_").split("_")
    return not _numeric(cells) or "id" in words or words == ["index"] or words == [""]


def _target(cells: Sequence[str]) -> str:
    if not _numeric(cells):
        return "classes"
    values = {float(cell) for cell in cells if cell.strip()}
    return "number" if len(values) > FEW or any(value != round(value) for value in values) else "classes"


def _about_label(label: str, cells: Sequence[str], target: str) -> list[str]:
    values = sorted({cell.strip() for cell in cells})
    if target == "number":
        return [f"{label!r} is a number: a regression"]
    return [f"{label!r} has {len(values)} classes: {', '.join(values[:6])}{' ...' if len(values) > 6 else ''}"]
