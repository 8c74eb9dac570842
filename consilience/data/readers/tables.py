"""Tables of text: comma or tab separated, plain or .gz, with the column names in the first row."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilience.core.settings import Invalid, nearest
from consilience.data.readers.files import read_text, refuse_unpacked

_INDEX = re.compile(r"__index_level_\d+__")  # the name of a frame's index in a Parquet file by pandas


@dataclass(frozen=True, kw_only=True)
class FileTable:
    """Named columns of text and the file they came from."""

    path: Path
    columns: dict[str, list[str]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str) -> list[str]:
        """One column, or `Invalid` with the nearest name that exists."""
        if name not in self.columns:
            known = ", ".join(self.columns)
            raise Invalid(f"{self.path} has no column {name!r}{nearest(name, self.columns)}; it has {known}")
        return self.columns[name]


def read_table(
    path: Path,
    *,
    separator: str | None = None,
    header: Sequence[str] = (),
    encoding: str = "utf-8-sig",
    strict: bool = True,
) -> FileTable:
    """A csv (quoted fields), tsv (quotes are plain characters) or Parquet file; `header` names bare columns."""
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path)
    _refuse_workbook(path)
    separator = separator or ("\t" if {".tsv", ".tab"} & {suffix.lower() for suffix in path.suffixes} else ",")
    text = io.StringIO(read_text(path, encoding), newline="")
    if separator == "\t":
        reader = csv.reader(text, delimiter=separator, quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(text, delimiter=separator, strict=strict)
    try:
        names = [name.strip() for name in (header or next(reader, []))]
        _check_header(path, names)
        _refuse_other_separator(path, names)
        rows = []
        for row in reader:
            if len(row) == len(names):
                if any("\0" in cell for cell in row):
                    raise Invalid(f"{path}, line {reader.line_num} holds a NUL byte: it is damaged, or not text")
                rows.append(row)
            elif row:  # an empty line is no row
                raise Invalid(
                    f"{path}, line {reader.line_num}: {len(row)} fields where the header has {len(names)} columns"
                )
    except csv.Error as problem:
        raise Invalid(f"{path}, line {reader.line_num}: {problem}") from problem
    if not rows:
        raise Invalid(f"{path} has a header but no rows")
    return FileTable(path=path, columns={name: list(values) for name, values in zip(names, zip(*rows))})


def _refuse_workbook(path: Path) -> None:
    """Refuse Excel's and LibreOffice's files, which are archives and no text; say how to convert them."""
    with path.open("rb") as file:
        start = file.read(8)
    if start.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise Invalid(
            f"{path} is a workbook or archive, not a table of text; save its sheet as .csv, such as by "
            "pandas.read_excel(FILE).to_csv(NEW, index=False)"
        )


def _refuse_other_separator(path: Path, names: Sequence[str]) -> None:
    """Refuse a single name that is several ones with another separator between them; say how to convert the file."""
    other = next((mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]), "")
    if other:
        known = {";": "semicolons", "\t": "tabs", "|": "bars"}[other]
        raise Invalid(
            f"{path} has {known} between its columns where commas are needed; convert it, such as by pandas.read_csv("
            f"FILE, sep={other!r}).to_csv(NEW, index=False), with decimal=',' in read_csv if numbers have commas"
        )


def read_records(path: Path) -> FileTable:
    """A csv, tsv or jsonl file as columns of text; what a JSON line does not name, or says is null, is empty."""
    if not {".jsonl", ".ndjson"} & {suffix.lower() for suffix in path.suffixes}:
        return read_table(path)
    records = read_json_lines(path, ())
    names = dict.fromkeys(name for record in records for name in record)
    if not names:
        raise Invalid(f"{path} has no rows: each line must be a JSON object that names its columns")
    return FileTable(path=path, columns={name: [_cell(record.get(name)) for record in records] for name in names})


def read_json_lines(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """One JSON object a line, each of which must have these fields."""
    records = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        record = parse_json(line, f"{path}, line {number}")
        if not isinstance(record, dict):
            raise Invalid(f'{path}, line {number} is not a JSON object such as {{"text": ...}}')
        absent = [name for name in fields if name not in record]
        if absent:
            raise Invalid(f"{path}, line {number} has no {', '.join(absent)}")
        records.append(record)
    return records


def read_json(path: Path) -> Any:
    """One JSON document."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> Any:
    """JSON text, or `Invalid` that says where it is broken."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:  # also numbers of more than 4300 digits
        raise Invalid(f"{where} is not readable JSON: {problem}") from problem


def _read_parquet(path: Path) -> FileTable:
    """A Parquet file as columns of text, gaps empty; numbers are written so that they read back as they were."""
    try:
        import pyarrow.parquet
    except ImportError as problem:
        raise ImportError(f'{path} needs pyarrow: pip install "consilience[frames]"') from problem
    size = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns: dict[str, list[str]] = {name: [] for name in file.schema_arrow.names if not _INDEX.fullmatch(name)}
            for batch in file.iter_batches(columns=list(columns)):
                for name, cells in batch.to_pydict().items():
                    columns[name] += map(_cell, cells)
                    size += sum(map(len, columns[name][-len(cells) :])) if cells else 0
                refuse_unpacked(path, size)
    except (OSError, ValueError) as problem:  # pyarrow's own errors are among these
        if isinstance(problem, Invalid):
            raise
        raise Invalid(f"{path} is not a readable Parquet file: {problem}") from problem
    _check_header(path, list(columns))
    if not any(columns.values()):
        raise Invalid(f"{path} has columns but no rows")
    return FileTable(path=path, columns=columns)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_cell(item) for item in value)
    return "" if value is None else str(value)


def _check_header(path: Path, names: Sequence[str]) -> None:
    if not names or not any(names):
        raise Invalid(f"{path} is empty: the first row must name the columns")
    repeated = {name for name in names if list(names).count(name) > 1}
    if repeated:
        raise Invalid(f"{path} names column {', '.join(sorted(repeated))} twice")
