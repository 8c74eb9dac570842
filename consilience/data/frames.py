"""`cs.from_frames`: a federation of pandas frames (or anything that gives columns by name)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from consilience.core.federation import Federation
from consilience.core.settings import Invalid, check_value, nearest
from consilience.data.dataset import Dataset
from consilience.data.datasets.prepare.column_mistakes import FEW, refuse_repeated
from consilience.data.datasets.prepare.columns import OwnedPlace, row_named
from consilience.data.datasets.prepare.owned_rows import OwnedRows, Target, table_set
from consilience.data.datasets.prepare.splits import HeldOut
from consilience.data.federate import federate
from consilience.data.partition import partition

Columns = dict[str, list[str]]


def from_frames(
    frames: Any,
    label: str,
    *,
    client: str | None = None,
    test: Any = None,
    columns: Sequence[str] = (),
    categorical: Sequence[str] | None = None,
    target: Target | None = None,
    standardise: bool = True,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Federation:
    """A federation of tables: numbers standardised, text columns one-hot, gaps filled and marked.

        federation = cs.from_frames({"north": frame_a, "south": frame_b}, label="outcome")
        federation = cs.from_frames(frame, label="outcome", client="hospital")

    frames: a frame for each client, by name or in a list; or one frame whose column `client` says who owns each row.
        Statistics and categories are those of all clients' training rows together: for a private run encode columns
        yourself and use `Federation.from_clients`.
    label: the column to predict.
    test: further frames of the same form; by default a share of `test_fraction` of each client's rows, drawn by `seed`.
    columns: the features; by default all other columns.
    categorical: those that are one-hot; by default those with text.
    target: "classes" or "number"; by default classes for text, true and false, and few (20) distinct whole numbers.
    """
    dataset = frames_dataset(
        frames,
        label,
        client=client,
        test=test,
        columns=columns,
        categorical=categorical,
        target=target,
        standardise=standardise,
        test_fraction=test_fraction,
        seed=seed,
    )
    return federate(dataset, partition("natural"), seed=seed)[0]


def frames_dataset(
    frames: Any,
    label: str,
    *,
    client: str | None = None,
    test: Any = None,
    columns: Sequence[str] = (),
    categorical: Sequence[str] | None = None,
    target: Target | None = None,
    standardise: bool = True,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """The same rows as a `Dataset`, with clients as its groups."""
    refuse_repeated(columns, label)
    for option, value, allowed in (("target", target, Target | None), ("test_fraction", test_fraction, HeldOut)):
        check_value(option, value, allowed)
    names, table, owners = _joined(frames, label, client, columns, "frames")
    count = len(owners)
    if test is not None:
        _, more, others = _joined(test, label, client, names, "test")
        strangers = [who for who in others if who not in owners]
        if strangers:
            raise Invalid(f"test has the client {strangers[0]!r}, for which there are no training rows")
        table, owners = {name: [*table[name], *more[name]] for name in table}, [*owners, *others]
    rows = OwnedRows(
        where="frames",
        columns={name: table[name] for name in names},
        labels=table[label],
        owners=owners,
        given=None if test is None else count,
    )
    kind = target or ("number" if _are_measurements(table[label]) else "classes")
    split = (test_fraction, seed)
    return table_set("frames", rows, categorical=categorical, target=kind, standardise=standardise, split=split)


def _joined(
    frames: Any, label: str, client: str | None, columns: Sequence[str], what: str
) -> tuple[list[str], Columns, list[str]]:
    """(feature columns, their cells and the labels of all rows, owner of each row); missing labels are an error."""
    if isinstance(frames, (list, tuple)):
        frames = {str(k): frame for k, frame in enumerate(frames)}
    if isinstance(frames, Mapping) and not _is_frame(frames):
        if client is not None:
            raise Invalid(f"client = {client!r} is for one table, and {what} has one for each client: leave it out")
        if not frames:
            raise Invalid(f"{what} is empty: a federation needs at least one client")
        parts = {str(name): columns_of(frame, f"client {str(name)!r}") for name, frame in frames.items()}
        owners = [who for who, part in parts.items() for _ in next(iter(part.values()))]
    elif client is None:
        raise Invalid(f"{what} is one table: name the column of clients, client=..., or give one frame for each")
    else:
        table = columns_of(frames, what)
        _refuse_absent([client], table, what)
        owners = [owner.strip() for owner in table.pop(client)]
        if "" in owners:
            raise Invalid(f"{what}: row {owners.index('')} names no client in the column {client!r}")
        parts = {"": table}
    first = next(iter(parts.values()))
    names = list(columns) or [name for name in first if name != label]
    for who, part in parts.items():
        _refuse_absent([label, *names], part, f"client {who!r}" if who else what)
    found = {name: [cell for part in parts.values() for cell in part[name]] for name in (label, *names)}
    gap = next((row for row, cell in enumerate(found[label]) if not cell.strip()), None)
    if gap is not None:
        place = row_named(gap, OwnedPlace(place=what, owners=owners))
        raise Invalid(f"{what}: {place} has no value in the column {label!r}: remove the row")
    return names, found, owners


def _refuse_absent(names: Sequence[str], table: Columns, who: str) -> None:
    for name in names:
        if name not in table:
            raise Invalid(f"{who} has no column {name!r}{nearest(name, table)}; it has {', '.join(table)}")


def _is_frame(value: Any) -> bool:
    return hasattr(value, "columns") or hasattr(value, "column_names")


def columns_of(frame: Any, who: str) -> Columns:
    """The columns of a pandas (or polars) frame or of a Hugging Face data set as text; gaps are empty."""
    if not _is_frame(frame):
        raise Invalid(f"{who} is {type(frame).__name__}: it must be a frame with named columns, such as pandas'")
    names = list(frame.column_names if hasattr(frame, "column_names") else frame.columns)
    found: Columns = {}
    for name in names:
        if str(name) in found:
            raise Invalid(f"{who} has the column {str(name)!r} twice: rename one")
        found[str(name)] = [_text(value, name, who) for value in frame[name]]
    if not found or not next(iter(found.values())):
        raise Invalid(f"{who} has no rows: leave it out, or give it data")
    return found


def _text(value: Any, name: Any, who: str) -> str:
    """A cell as text that reads back as the same number."""
    if (
        value is None
        or (isinstance(value, float) and math.isnan(value))
        or type(value).__name__ in ("NAType", "NaTType")
    ):
        return ""
    if isinstance(value, (list, dict, tuple, np.ndarray)) or hasattr(value, "convert"):
        raise Invalid(
            f"{who}: the column {str(name)!r} holds {type(value).__name__}, not text or numbers: drop it, or use "
            "cs.from_hugging_face for pictures and vectors"
        )
    if isinstance(value, (bool, np.bool_)):
        return str(int(value))
    return str(value.item() if isinstance(value, np.generic) else value)


def _are_measurements(labels: Sequence[str]) -> bool:
    """Whether labels are real-valued: numbers that are not all whole, or that have many distinct values."""
    try:
        values = {float(label) for label in labels}
    except ValueError:
        return False
    return any(value != round(value) for value in values) or len(values) > FEW
