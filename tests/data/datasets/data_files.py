"""Writers of small files in the formats the data sets read."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest


def write_idx(path: Path, array: np.ndarray) -> None:
    content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_sheet(path: Path, pictures: np.ndarray, columns: int) -> None:
    """Pictures [N, h, h, 3] or [N, h, h] tiled row by row, one by one."""
    from PIL import Image

    side = pictures.shape[1]
    sheet = np.zeros((-(-len(pictures) // columns) * side, columns * side, *pictures.shape[3:]), np.uint8)
    for number, picture in enumerate(pictures):
        top, left = number // columns * side, number % columns * side
        sheet[top : top + side, left : left + side] = picture
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"lossless": True, "exact": True} if path.suffix == ".webp" else {}
    Image.fromarray(sheet).save(path, **options)


def write_picture(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def real_data(name: str) -> str:
    """The user's data folder if it holds this set; otherwise the test is skipped."""
    folder = os.environ.get("CONSILIENCE_DATA")
    if not folder or not (Path(folder) / name).is_dir():
        pytest.skip(f"set CONSILIENCE_DATA to a folder that holds {name}")
    return folder
