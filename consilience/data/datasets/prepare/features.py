"""Ready arrays to features: bytes are pictures, other numbers are measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from consilience.core.settings import Invalid
from consilience.data.datasets.prepare.columns import standardised
from consilience.data.datasets.prepare.pictures import channels_first, scale_pictures

Scaling = Literal["standard", "unit", "signed", "none"]
"""standard: mean 0, deviation 1; unit and signed: pictures to [0, 1] or [-1, 1]; none: measurements as they are."""


def scale_features(train: np.ndarray, test: np.ndarray, how: Scaling, *, where: Path | str) -> tuple[Any, Any]:
    """Float32 features of both parts, with statistics from the training rows alone."""
    if train.shape[1:] != test.shape[1:]:
        raise Invalid(f"{where}: training rows have shape {train.shape[1:]} but test rows {test.shape[1:]}")
    if train.dtype == np.uint8 and train.ndim > 2:
        pictures, test_pictures = channels_first(train, where), channels_first(test, where)
        return scale_pictures(pictures, test_pictures, "unit" if how == "none" else how)
    if how in ("unit", "signed"):
        raise Invalid(
            f"{where}: normalise = {how!r} is for pictures; these rows are {train.dtype}: use standard or none"
        )
    values = np.concatenate([train, test]).astype(np.float64)
    if how == "standard":
        values = standardised(values, np.arange(len(train)))
    values = values.astype(np.float32)
    return values[: len(train)], values[len(train) :]
