"""Finding a data set's files, and opening them whether or not they are compressed."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from consilience.core.settings import Invalid

DATA_DIR_VARIABLE = "CONSILIENCE_DATA"
NEVER_PACKED = (".npz", ".webp", ".png", ".jpg", ".gz")  # compressed already

MOST_UNPACKED = 1 << 30  # bytes: up to here a file may be packed as tightly as it is
MOST_GROWTH = 100  # of longer ones when they are unpacked


def data_directory(data_dir: str | Path | None) -> Path:
    """The folder of all data sets: the argument, else the environment variable, else `./data`."""
    if data_dir is None:
        data_dir = os.environ.get(DATA_DIR_VARIABLE) or "data"
    if not isinstance(data_dir, (str, Path)):
        raise Invalid(f"data_dir = {data_dir!r} must be the path of a folder, not {type(data_dir).__name__}")
    return Path(data_dir).expanduser()


@dataclass(frozen=True, kw_only=True)
class Source:
    """The folders in which one data set's files may lie, in order of preference, and how to get the files."""

    name: str
    places: tuple[Path, ...]
    how: str

    def locate(self, forms: Mapping[str, Sequence[str]]) -> tuple[str, list[Path]]:
        """The first form whose files are all in one folder (each plain or .gz), or `FileNotFoundError`."""
        for place in self.places:
            for form, names in forms.items():
                paths = [plain_or_gz(place / name) for name in names]
                if all(paths):
                    return form, [path for path in paths if path is not None]
        raise self.missing(forms)

    def find(self, *names: str) -> Path:
        """The first of these files (or folders) that exists, searching folder by folder."""
        return self.locate({name: (name,) for name in names})[1][0]

    def missing(self, forms: Mapping[str, Sequence[str]]) -> FileNotFoundError:
        """The error: which files were searched, where, which exist and how to get the rest."""
        wanted = "\n  or ".join(_listed_files(names) for names in forms.values())
        lines = [f"the files of data set {self.name!r} were not found. Looked for:\n     {wanted}"]
        lines.append(f"in {', '.join(str(place) for place in self.places)}.")
        for place in self.places:
            for names in forms.values():
                present = [name for name in names if plain_or_gz(place / name)]
                if present:
                    absent = [name for name in names if name not in present]
                    lines.append(f"{place} has {', '.join(present)} but not {', '.join(absent)}.")
        lines.append(f"{self.how} Name the folder that holds it with data_dir or ${DATA_DIR_VARIABLE}.")
        return FileNotFoundError("\n".join(lines))


def source(name: str, data_dir: str | Path | None, *, folders: Sequence[str] = (), how: str) -> Source:
    """Look in `data_dir/name`, then in the other customary folders, then in `data_dir` itself."""
    top = data_directory(data_dir)
    places = tuple(dict.fromkeys((top / name, *(top / folder for folder in folders), top)))
    return Source(name=name, places=places, how=how)


def chosen_source(folder: str, data_dir: str | Path | None, *, how: str) -> Source:
    """Look only in the folder the user named, relative to `data_dir`."""
    place = data_directory(data_dir) / folder
    if not place.is_dir():
        raise FileNotFoundError(
            f"the folder {place}{_from_here(place)} was not found. {how} Name it with folder and data_dir."
        )
    return Source(name=place.resolve().name, places=(place,), how=how)


def chosen_file(file: str, data_dir: str | Path | None, *, how: str) -> Path:
    """The file the user named, relative to `data_dir`."""
    path = data_directory(data_dir) / file
    if path.is_dir():
        raise Invalid(f"{path} is a folder where a file is needed; client_files reads a folder with a file per client")
    if not path.is_file():
        raise FileNotFoundError(
            f"the file {path}{_from_here(path)} was not found. {how} Name it with its option and data_dir."
        )
    return path


def _from_here(path: Path) -> str:
    """' (in FOLDER)' for a relative path, which depends on where the command was started."""
    return "" if path.is_absolute() else f" (in {Path.cwd()})"


def plain_or_gz(path: Path) -> Path | None:
    """The path itself, or its .gz, or None."""
    if path.exists():
        return path
    packed = path.with_name(path.name + ".gz") if path.suffix not in NEVER_PACKED else path
    return packed if packed.exists() else None


def open_binary(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed if its name ends in .gz."""
    if path.is_dir():
        raise Invalid(f"{path} is a folder where a file is needed")
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def refuse_unpacked(path: Path, size: int) -> None:
    """Refuse a packed file of which `size` bytes are unpacked, or will be, if these are far more than it has."""
    length = path.stat().st_size
    if size > max(MOST_UNPACKED, MOST_GROWTH * length):
        raise Invalid(f"{path} has {length:,} bytes and unpacks to {size:,} or more: unpack it if that is meant")


def read_bytes(path: Path, *, most: int | None = None) -> bytes:
    """All bytes of a plain or .gz file, `most` at most when unpacked; a broken archive is refused by name."""
    parts, length = [], 0
    try:
        with open_binary(path) as file:
            while (part := file.read(1 << 20)) and (most is None or length <= most):
                parts.append(part)
                length += len(part)
                refuse_unpacked(path, length)
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise Invalid(f"{path} is a damaged or cut-off .gz file ({problem}): fetch it again") from problem
    if most is not None and length > most:
        raise Invalid(f"{path} holds more than {most:,} bytes: it is not the file it should be")
    return b"".join(parts)


def read_text(path: Path, encoding: str = "utf-8-sig") -> str:
    """All text of a plain or .gz file; bytes that are not text in this encoding are refused by position."""
    try:
        return read_bytes(path).decode(encoding)
    except UnicodeDecodeError as problem:
        name = encoding.removesuffix("-sig").upper()
        raise Invalid(
            f"{path} is not {name} text: byte {problem.start} cannot be read ({problem.reason}); save it as {name}, "
            "or check that it is a text file"
        ) from problem


def _listed_files(names: Sequence[str]) -> str:
    packable = [Path(name).suffix not in NEVER_PACKED and not name.endswith("/") for name in names]
    return ", ".join(f"{name}[.gz]" if may else name for name, may in zip(names, packable))
