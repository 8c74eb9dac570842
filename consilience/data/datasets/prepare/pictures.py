"""Pixels to features: channels first, scaled as asked with the training pictures' statistics."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core.settings import Invalid

Normalise = Literal["standard", "unit", "signed"]
"""standard: mean 0, deviation 1 per channel over the training pictures; unit: [0, 1]; signed: [-1, 1]."""

CHANNELS = (1, 3, 4)
CHUNK = 64  # pictures at a time: few enough to stay in the processor's cache


def scale_pictures(train: np.ndarray, test: np.ndarray, how: Normalise, *, top: int = 255) -> tuple[Tensor, Tensor]:
    """Float pictures [N, C, H, W] from whole-number ones whose largest possible value is `top`."""
    mean, deviation = picture_statistics(train, how, top=top)
    return shift_pictures(train, mean, deviation, top=top), shift_pictures(test, mean, deviation, top=top)


def picture_statistics(train: np.ndarray, how: Normalise, *, top: int = 255) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each channel with which pixels in [0, 1] are standardised."""
    return statistics_of_pieces([train], how, top=top)


def statistics_of_pieces(
    train: Iterable[np.ndarray], how: Normalise, *, top: int = 255
) -> tuple[np.ndarray, np.ndarray]:
    """The same for training pictures that come in pieces."""
    return {
        "standard": lambda: channel_statistics(train, top),
        "unit": lambda: (np.zeros(1), np.ones(1)),
        "signed": lambda: (np.full(1, 0.5), np.full(1, 0.5)),
    }[how]()


def shift_pictures(pictures: np.ndarray, mean: np.ndarray, deviation: np.ndarray, *, top: int = 255) -> Tensor:
    """(pixel / top - mean) / deviation per channel, as float32."""
    scaled = torch.empty(pictures.shape, dtype=torch.float32)
    centre, width = (torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1) for values in (mean, deviation))
    for start in range(0, len(pictures), CHUNK):
        pixels = torch.from_numpy(pictures[start : start + CHUNK].astype(np.float32))
        torch.div(pixels.div_(top).sub_(centre), width, out=scaled[start : start + CHUNK])
    return scaled


def channel_statistics(pieces: Iterable[np.ndarray], top: int = 255) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each channel, from exact integer sums so that every machine gets the same."""
    total = squares = np.zeros(1, np.uint64)
    count = 0
    for pictures in pieces:
        for start in range(0, len(pictures), CHUNK):
            chunk = pictures[start : start + CHUNK].astype(np.uint32)  # 16-bit values squared still fit
            total = total + chunk.sum((0, 2, 3), dtype=np.uint64)
            squares = squares + np.square(chunk, out=chunk).sum((0, 2, 3), dtype=np.uint64)
        count += pictures.size // pictures.shape[1]
    count = max(count, 1)
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return mean / top, np.where(deviation > 0, deviation, top) / top


def channels_first(pictures: np.ndarray, where: Path | str) -> np.ndarray:
    """[N, H, W], [N, H, W, C] or [N, C, H, W] -> [N, C, H, W] (1, 3 or 4 channels)."""
    if pictures.ndim == 3:
        return pictures[:, None]
    first = pictures.ndim == 4 and pictures.shape[1] in CHANNELS
    last = pictures.ndim == 4 and pictures.shape[3] in CHANNELS
    if first and last:  # ambiguous tiny pictures: assume they are square
        last = pictures.shape[1] == pictures.shape[2]
    if last:
        return np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))
    if first:
        return pictures
    raise Invalid(f"{where}: pictures of shape {pictures.shape} are neither [N, H, W] nor 1, 3 or 4 channels of it")


def resize_square(pictures: np.ndarray, side: int) -> np.ndarray:
    """Pictures [N, C, H, W] uint8 at side x side, bilinear."""
    if pictures.shape[2:] == (side, side):
        return pictures
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(pictures.astype(np.float32)), size=(side, side), mode="bilinear", align_corners=False
    )
    return resized.round_().to(torch.uint8).numpy()
