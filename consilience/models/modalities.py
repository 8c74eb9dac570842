"""Rows of several modalities: a dict of tensors by name and, if modalities may be missing, a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

PRESENT = "present"
"""The key of x whose tensor [n, modalities] is 1 where a row has the modality; columns in order of name."""


def modality_names(x: Mapping[str, Any]) -> tuple[str, ...]:
    """The modalities in the order of the columns of x["present"]."""
    return tuple(sorted(name for name in x if name != PRESENT))


def present_columns(present: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """{name: [n, 1]} of the mask [n, modalities]."""
    return {name: present[..., column : column + 1] for column, name in enumerate(sorted(names))}
