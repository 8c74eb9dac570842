"""Conversion of class names to class numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core.settings import Invalid


def sorted_names(names: Sequence[str]) -> tuple[str, ...]:
    """Distinct names: by value when all are whole numbers, else in alphabetical order."""
    distinct = set(names)
    try:
        return tuple(sorted(distinct, key=int))
    except ValueError:
        return tuple(sorted(distinct))


def are_names(y: Any) -> bool:
    """Whether targets are strings."""
    if isinstance(y, np.ndarray):
        return y.dtype.kind in "UO"
    return isinstance(y, (list, tuple)) and bool(y) and isinstance(y[0], str)


def numbered(y: Any, names: Sequence[str], who: str) -> Tensor:
    """Class names as indices into the list of classes."""
    place = {name: number for number, name in enumerate(names)}
    texts = [str(name) for name in np.asarray(y).reshape(-1)]
    unknown = next((row for row, name in enumerate(texts) if name not in place), None)
    if unknown is not None:
        shown = ", ".join(list(names)[:10]) + (" ..." if len(names) > 10 else "")
        raise Invalid(f"{who}: the target {texts[unknown]!r} of row {unknown} is not one of the classes {shown}")
    return torch.tensor([place[name] for name in texts], dtype=torch.int64).reshape(np.asarray(y).shape)
