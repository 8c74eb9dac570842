"""Rows of a Hugging Face data set (or anything with columns by name) to features and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from consilience.core.settings import Invalid, nearest
from consilience.data.datasets.prepare.assemble import refuse_nonfinite
from consilience.data.datasets.prepare.features import Scaling, scale_features
from consilience.data.datasets.prepare.hub_column import HubColumn
from consilience.data.datasets.prepare.labels import class_numbers, number_names
from consilience.data.datasets.prepare.pictures import scale_pictures
from consilience.data.datasets.prepare.stored import Keeping, stored_features
from consilience.data.datasets.prepare.texts import TextFeatures
from consilience.data.readers.pictures import Fit, picture_array

USUAL_INPUTS = ("image", "img", "picture", "text", "sentence", "content", "features", "x")
USUAL_LABELS = ("label", "labels", "fine_label", "target", "y", "category", "intent")


@dataclass(frozen=True, kw_only=True)
class HubReading:
    """Which columns to read and how: pictures resized, texts turned into features, numbers scaled."""

    x: str | None
    label: str | None
    size: int | None
    fit: Fit
    grey: bool
    normalise: Scaling
    texts: TextFeatures
    rows: Keeping = "memory"

    def columns(self, rows: Any, where: str) -> tuple[str, str]:
        """The input and label columns: those asked for, else those with a usual name."""
        return (
            _pick("x", self.x, USUAL_INPUTS, list(rows.column_names), where),
            _pick("label", self.label, USUAL_LABELS, list(rows.column_names), where),
        )

    def features(self, train: Sequence[Any], test: Sequence[Any], where: str) -> tuple[Any, Any, tuple[str, ...]]:
        """(training features, test features, vocabulary) of pictures, texts or numbers."""
        if not train or not test:
            raise Invalid(f"{where} has {len(train)} training and {len(test)} test rows: both are needed")
        if isinstance(train[0], str):
            return self.texts(list(train), list(test))
        is_picture = hasattr(train[0], "convert")  # as pillow's have
        values = [self._pixels(value) for value in (*train, *test)] if is_picture else [*train, *test]
        rows = _stack(values, where)
        rows, test_rows = rows[: len(train)], rows[len(train) :]
        if not is_picture:
            return *scale_features(rows, test_rows, self.normalise, where=where), ()
        return *scale_pictures(rows, test_rows, "unit" if self.normalise == "none" else self.normalise), ()

    def kept(
        self, parts: Sequence[Any], column: str, train: np.ndarray, test: np.ndarray, where: str
    ) -> tuple[Any, Any, tuple[str, ...]]:
        """The same for rows that stay in the data set's files."""
        if isinstance(parts[0][0][column], str):
            raise Invalid(
                f"{where}: rows = 'file' is for pictures and numbers, and {column!r} holds texts: leave it out"
            )
        source = HubColumn(parts, column, self._pixels, where)
        scaling = None if source.dtype != torch.uint8 and self.normalise == "none" else self.normalise
        return *stored_features(source, train, test, scaling, where), ()

    def _pixels(self, picture: Any) -> np.ndarray:
        return picture_array(picture, size=self.size, fit=self.fit, grey=self.grey)


def read_labels(rows: Any, values: Sequence[Any], column: str, where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Class numbers and class names: the data set's own, or the sorted distinct labels if they are text."""
    gap = next((row for row, value in enumerate(values) if value is None or value == ""), None)
    if gap is not None:
        raise Invalid(f"{where}: row {gap} has no label in the column {column!r}: remove it, or give it one")
    if len(values) and isinstance(values[0], str):
        return number_names(values, where=where)
    feature = (getattr(rows, "features", None) or {}).get(column)
    names = tuple(getattr(feature, "names", None) or ())
    numbers = np.asarray(values)
    classes = len(names) or int(numbers.max(initial=0)) + 1
    labels = class_numbers(numbers, rows=len(values), classes=classes, where=where)
    return labels, names or tuple(str(number) for number in range(classes))


def _pick(option: str, asked: str | None, usual: Sequence[str], present: list[str], where: str) -> str:
    listed = ", ".join(present)
    if asked is not None:
        if asked not in present:
            raise Invalid(f"{where} has no column {asked!r}{nearest(asked, present)}; it has {listed}")
        return asked
    found = next((name for name in usual if name in present), None)
    if found is None:
        raise Invalid(f"{where} has the columns {listed}: say which one with the option {option}")
    return found


def _stack(values: Sequence[Any], where: str) -> np.ndarray:
    shapes = {np.shape(value) for value in values}
    if len(shapes) != 1:
        raise Invalid(f"{where}: rows have the shapes {sorted(shapes)[:5]}: give `size` to bring pictures to one")
    array = np.stack([np.asarray(value) for value in values])
    if array.dtype.kind not in "uif" or array.ndim < 2:
        raise Invalid(f"{where}: rows must be pictures, texts or lists of numbers, not {array.dtype} {array.shape}")
    refuse_nonfinite(array, where)
    return array
