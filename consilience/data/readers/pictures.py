"""Picture files: one by one (PNG, JPEG, WebP ...) or many tiled on one sheet."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from consilience.core.settings import Invalid

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")
Fit = Literal["crop", "squash", "pad"]
MOST_PIXELS = 89_478_485  # Pillow's own limit, beyond which it only warns: 256 MiB once decoded
NEARLY_BLACK = 8  # mean of a cell: JPEG leaves a few grey levels in cells that were black


def read_pictures(paths: Sequence[Path], *, size: int | None, fit: Fit, grey: bool) -> np.ndarray:
    """Pictures [N, channels, height, width] uint8, each brought to size x size (None: all must agree already)."""
    if not paths:
        raise Invalid("there are no pictures to read")
    first = _read_picture(paths[0], size, fit, grey)
    pictures = np.empty((len(paths), *first.shape), np.uint8)

    def fill(row: int) -> None:
        picture = _read_picture(paths[row], size, fit, grey)
        if picture.shape != first.shape:
            raise Invalid(
                f"{paths[row]} is {picture.shape[2]}x{picture.shape[1]} but {paths[0]} is "
                f"{first.shape[2]}x{first.shape[1]}: give `size` to bring them to one size"
            )
        pictures[row] = picture

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding releases the interpreter lock
        for _ in pool.map(fill, range(len(paths))):
            pass
    return pictures


def read_sheet(path: Path, *, side: int, grey: bool = False) -> tuple[np.ndarray, int]:
    """All cells [rows * columns, channels, side, side] of a sheet, read row by row, and its number of columns."""
    sheet = _decode(path, lambda picture: np.asarray(picture.convert("L" if grey else "RGB")))
    height, width = sheet.shape[:2]
    if height % side or width % side:
        raise Invalid(f"{path} is {width}x{height}, which is not whole pictures of {side}x{side}: check `side`")
    rows, columns, channels = height // side, width // side, 1 if grey else 3
    cells = sheet.reshape(rows, side, columns, side, channels).transpose(0, 2, 4, 1, 3)
    return cells.reshape(-1, channels, side, side), columns


def read_sheets(paths: Sequence[Path], *, side: int, count: int, grey: bool = False) -> np.ndarray:
    """The first `count` pictures of full sheets one behind the other; only the last may have empty cells."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sheets = list(pool.map(lambda path: read_sheet(path, side=side, grey=grey), paths))
    capacity = sum(len(cells) for cells, _ in sheets)
    spare, (last, columns) = capacity - count, sheets[-1]
    named = ", ".join(str(path) for path in paths)
    if spare < 0 or spare >= columns:
        raise Invalid(f"{named} holds {capacity} cells of {side}x{side} but there are {count} labels")
    if spare and last[-spare:].mean((1, 2, 3)).max() > NEARLY_BLACK:
        raise Invalid(f"{named}: cells behind picture {count} are not empty, so there are more pictures than labels")
    cells = sheets[0][0] if len(sheets) == 1 else np.concatenate([cells for cells, _ in sheets])
    return cells[:count]


def find_pictures(folder: Path) -> list[Path]:
    """The picture files directly in a folder, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != ".")


def picture_array(picture: Any, *, size: int | None, fit: Fit, grey: bool) -> np.ndarray:
    """An opened pillow picture as [channels, height, width] uint8."""
    mode = "L" if grey else "RGB"
    if size is not None:
        picture.draft(mode, (size, size))  # a large JPEG is decoded at half, quarter or eighth scale
    pixels = np.asarray(_fitted(picture.convert(mode), size, fit))
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def _read_picture(path: Path, size: int | None, fit: Fit, grey: bool) -> np.ndarray:
    return _decode(path, lambda picture: picture_array(picture, size=size, fit=fit, grey=grey))


def _fitted(picture: Any, size: int | None, fit: Fit) -> Any:
    from PIL import Image, ImageOps

    if size is None or picture.size == (size, size):
        return picture
    if fit == "crop":
        return ImageOps.fit(picture, (size, size), Image.Resampling.BILINEAR)
    if fit == "pad":
        return ImageOps.pad(picture, (size, size), Image.Resampling.BILINEAR)
    return picture.resize((size, size), Image.Resampling.BILINEAR)


def _decode(path: Path, read: Callable[[Any], np.ndarray]) -> np.ndarray:
    Image = _pillow()
    try:
        with Image.open(path) as picture:  # only its head is read here
            pixels = picture.width * picture.height
            if pixels > MOST_PIXELS or pixels > max(2**24, 1000 * path.stat().st_size):
                raise Image.DecompressionBombError(f"{picture.width} x {picture.height} pixels")
            return read(picture)
    except FileNotFoundError:
        raise
    except Image.DecompressionBombError as problem:
        raise Invalid(f"{path} is too large a picture ({problem}): cut it into smaller ones") from problem
    except (OSError, SyntaxError, ValueError, EOFError) as problem:
        raise Invalid(f"{path} is not a readable picture ({problem}): fetch it again or remove it") from problem


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as problem:
        raise ImportError('reading pictures needs pillow: pip install "consilience[pictures]"') from problem
    return Image
