"""Renumbers classes to match another list of class names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from consilience.core.settings import Invalid, nearest
from consilience.data.dataset import Dataset


def relabelled(data: Dataset, names: Sequence[str]) -> Dataset:
    """The same rows with the class numbers of this list; data without class names are unchanged."""
    known = tuple(names)
    if not known or not data.label_names or data.label_names == known:
        return data
    if data.classes is None:
        raise Invalid(f"{data.name!r} has the labels {', '.join(data.label_names)}, not {', '.join(known)}")
    strangers = [name for name in data.label_names if name not in known]
    if strangers:
        shown = ", ".join(known[:10]) + (" ..." if len(known) > 10 else "")
        hint = nearest(strangers[0], known)
        raise Invalid(f"{data.name!r} has the class {strangers[0]!r}, which is not one of {shown}{hint}")
    places = torch.tensor([known.index(name) for name in data.label_names])

    def moved(y: Tensor) -> Tensor:
        return torch.where(y < 0, y, places[y.clamp(min=0)])  # negative targets (ignored) are unchanged

    return replace(data, y=moved(data.y), test_y=moved(data.test_y), classes=len(known), label_names=known)
