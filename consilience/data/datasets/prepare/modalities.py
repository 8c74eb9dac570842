"""Columns of text, picture files, vectors and table cells to the modalities of multimodal rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core.settings import Invalid
from consilience.data.datasets.prepare.columns import MISSING, encode_columns
from consilience.data.datasets.prepare.encoded import encoded_pictures
from consilience.data.datasets.prepare.pictures import Normalise, scale_pictures
from consilience.data.datasets.prepare.texts import TextFeatures
from consilience.data.readers.pictures import Fit, read_pictures
from consilience.models.modalities import PRESENT


@dataclass(frozen=True, kw_only=True)
class Modality:
    """One part of every training and test row, 0 where a row does not have it; [N] bool say which rows have it."""

    train: Tensor
    test: Tensor
    has: np.ndarray
    test_has: np.ndarray
    vocabulary: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PictureForm:
    """How picture files become pixels, and pixels features."""

    size: int
    fit: Fit
    grey: bool
    normalise: Normalise
    encoder: str | None = None
    weights: Path | None = None


def joined(
    parts: Mapping[str, Modality], where: Sequence[tuple[Path, int]], rows: tuple[np.ndarray, np.ndarray], *, mask: bool
) -> tuple[Any, Any]:
    """(x, test x): dicts of the parts, with `mask` or missing parts also "present"; a row without any is refused.

    where: file and number of every row; rows: which of them train and which test.
    """
    names = sorted(parts)
    found = []
    for numbers, train in ((rows[0], True), (rows[1], False)):
        has = np.stack([parts[name].has if train else parts[name].test_has for name in names], axis=1)  # [N, M]
        bare = np.flatnonzero(~has.any(1))
        if len(bare):
            path, row = where[numbers[bare[0]]]
            raise Invalid(f"{path}, row {row} has none of {', '.join(names)}: fill one in or remove the row")
        x: dict[str, Any] = {name: parts[name].train if train else parts[name].test for name in names}
        found.append((x, has))
    if mask or not all(has.all() for _, has in found):
        found = [({**x, PRESENT: torch.from_numpy(has.astype(np.int64))}, has) for x, has in found]
    return found[0][0], found[1][0]


def text_modality(texts: Sequence[str], rows: tuple[np.ndarray, np.ndarray], featurise: TextFeatures) -> Modality:
    """Texts as features; an empty cell is a missing text."""
    has = [np.array([bool(texts[row].strip()) for row in part], bool) for part in rows]
    train, test, vocabulary = featurise(*([texts[row] for row in part] for part in rows))
    return Modality(
        train=_zeroed(train, has[0]), test=_zeroed(test, has[1]), has=has[0], test_has=has[1], vocabulary=vocabulary
    )


def picture_modality(
    files: Sequence[str],
    rows: tuple[np.ndarray, np.ndarray],
    where: Sequence[tuple[Path, int]],
    folder: Path,
    form: PictureForm,
) -> Modality:
    """Pictures at `form.size`, scaled by the training rows' statistics; an empty cell is a missing picture."""
    has = [np.array([bool(files[row].strip()) for row in part], bool) for part in rows]
    pixels = []
    for part, kept, name in zip(rows, has, ("training", "test")):
        paths = [picture_path(files[row], where[row], folder) for row in part[kept]]
        if not paths:
            raise Invalid(f"{where[0][0]}: no {name} row has a picture: name no picture column")
        pixels.append(read_pictures(paths, size=form.size, fit=form.fit, grey=form.grey))
    seen = scale_pictures(pixels[0], pixels[1], "unit" if form.encoder else form.normalise)
    if form.encoder is not None:
        seen = encoded_pictures(*seen, encoder=form.encoder, weights=form.weights)
    spread = [_spread(values, kept) for values, kept in zip(seen, has)]
    return Modality(train=spread[0], test=spread[1], has=has[0], test_has=has[1])


def table_modality(
    columns: Mapping[str, Sequence[str]],
    rows: tuple[np.ndarray, np.ndarray],
    *,
    categorical: Sequence[str] | None,
    where: Path,
) -> Modality:
    """Table cells as features, standardised by the training rows; a row without any cell has no table."""
    rows_of_cells = zip(*columns.values())
    filled = np.array([any(cell.strip().lower() not in MISSING for cell in row) for row in rows_of_cells], bool)
    features = encode_columns(columns, rows[0][filled[rows[0]]], categorical=categorical, where=where)
    values = torch.from_numpy(features.values)
    train, test = (_zeroed(values[part], filled[part]) for part in rows)
    has, test_has = (filled[part] for part in rows)
    return Modality(train=train, test=test, has=has, test_has=test_has, feature_names=features.names)


def vector_modality(
    cells: Sequence[str], rows: tuple[np.ndarray, np.ndarray], where: Sequence[tuple[Path, int]]
) -> Modality:
    """Precomputed features: numbers separated by spaces or commas; an empty cell is a missing vector."""
    parsed = [_numbers(cell, place) for cell, place in zip(cells, where)]
    has = np.array([numbers is not None for numbers in parsed], bool)
    if not has.any():
        raise Invalid(f"{where[0][0]}: no row has a vector: name no vector column")
    first = next(row for row, numbers in enumerate(parsed) if numbers is not None)
    width = len(parsed[first] or [])
    values = torch.zeros(len(cells), width)
    for row, numbers in enumerate(parsed):
        if numbers is None:
            continue
        if len(numbers) != width:
            (path, at), (_, begun) = where[row], where[first]
            raise Invalid(f"{path}, row {at} has a vector of {len(numbers)} numbers where row {begun} has {width}")
        values[row] = torch.tensor(numbers)
    return Modality(train=values[rows[0]], test=values[rows[1]], has=has[rows[0]], test_has=has[rows[1]])


def picture_path(file: str, place: tuple[Path, int], folder: Path) -> Path:
    """The file that a cell of a table names, or `FileNotFoundError` with the row."""
    path = folder / file.strip()
    if not path.is_file():
        raise FileNotFoundError(
            f"{place[0]}, row {place[1]} names the picture {path}, which is not there: fetch it, name another folder, "
            "or leave the cell empty if the row has no picture"
        )
    return path


def _numbers(cell: str, place: tuple[Path, int]) -> list[float] | None:
    words = cell.replace(",", " ").replace("[", " ").replace("]", " ").split()
    try:
        return [float(word) for word in words] if words else None
    except ValueError as problem:
        raise Invalid(f"{place[0]}, row {place[1]}: a vector must be numbers ({problem})") from problem


def _zeroed(values: Tensor, has: np.ndarray) -> Tensor:
    kept = torch.from_numpy(has).reshape(-1, *([1] * (values.dim() - 1)))
    return torch.where(kept, values, torch.zeros_like(values))


def _spread(values: Any, has: np.ndarray) -> Tensor:
    """[rows that have it, ...] -> [N, ...], 0 in the other rows."""
    tensor = torch.as_tensor(values)
    whole = tensor.new_zeros(len(has), *tensor.shape[1:])
    whole[torch.from_numpy(has)] = tensor
    return whole
