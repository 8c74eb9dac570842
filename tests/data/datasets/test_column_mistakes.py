"""Tables with mistakes that would train without an error: each is refused, with the column and what to do."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import consilience as cs
from consilience.data.datasets.prepare.columns import encode_columns

ROWS = 120


def columns() -> dict[str, list[str]]:
    rng = np.random.default_rng(0)
    return {
        "age": [str(value) for value in rng.integers(20, 90, ROWS)],
        "sex": [str(value) for value in rng.choice(["f", "m"], ROWS)],
        "site": [f"s{row % 3}" for row in range(ROWS)],
        "outcome": [["ill", "well"][row % 2] for row in range(ROWS)],
    }


def load(folder: Path, changes: Mapping[str, list[str]] | None = None, **options: Any) -> cs.Dataset:
    table = {**columns(), **(changes or {})}
    with (folder / "x.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(table), *zip(*table.values())])
    given = {"file": "x.csv", "label": "outcome", "client": "site", **options}
    return cs.load_data("table", data_dir=folder, **given)


def dates(pattern: str) -> list[str]:
    return [pattern.format(day=1 + row % 28, month=1 + row // 28) for row in range(ROWS)]


AGES = columns()["age"]
MISTAKES: dict[str, tuple[dict[str, list[str]], str]] = {
    "iso_dates": ({"seen": dates("2024-{month:02d}-{day:02d}")}, r"column 'seen' holds dates \('2024-01-01' ...\)"),
    "times": ({"seen": dates("2024-{month:02d}-{day:02d} 12:30:00")}, "column 'seen' holds dates"),
    "german_dates": ({"seen": dates("{day}.{month}.2024")}, "column 'seen' holds dates"),
    "one_text": (
        {"age": [*AGES[:7], "abc", *AGES[8:]]},
        r"column 'age', row 2 of client 's1', holds numbers, but here 'abc': correct or empty that cell",
    ),
    "decimal_commas": ({"age": [f"{age},5" for age in AGES]}, "'age' holds numbers with a decimal comma .*a point"),
    "notes": (
        {"note": [f"patient {row} slept" for row in range(ROWS)]},
        "column 'note' holds 120 different texts in 120 rows",
    ),
    "too_large": ({"age": [*AGES[:-1], "1e300"]}, r"column 'age', row 39 of client 's2' is 1e\+300: change its unit"),
    "no_client": ({"site": ["", *columns()["site"][1:]]}, "row 0 names no client in the column 'site'"),
    "one_class": ({"outcome": ["ill"] * ROWS}, "every row has the label 'ill': there is nothing to tell apart"),
    "fractions": ({"outcome": [f"{row}.5" for row in range(ROWS)]}, "numbers with fractions.*target='number'"),
    "own_labels": ({"outcome": [f"n{row}" for row in range(ROWS)]}, "120 different labels: these are no classes"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_table_is_refused(name: str, tmp_path: Path) -> None:
    changes, said = MISTAKES[name]
    with pytest.raises(cs.Invalid, match=said):
        load(tmp_path, changes)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"columns": ("age", "outcome")}, "columns names 'outcome', which is the column to predict"),
        ({"columns": ("age", "sex"), "weight": "age"}, "columns names 'age', which is the weight"),
        ({"columns": ("age", "age")}, "columns names 'age' twice"),
        ({"categorical": ("sx",)}, r"categorical names 'sx', which is no feature \(did you mean 'sex'\?\)"),
        ({"client": "outcome"}, "client and label both name the column 'outcome'"),
    ],
)
def test_options_that_name_the_wrong_columns_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(cs.Invalid, match=said):
        load(tmp_path, **options)


def test_texts_are_used_as_categories_where_this_is_asked_for(tmp_path: Path) -> None:
    seen = dates("2024-{month:02d}-{day:02d}")
    data = load(tmp_path, {"seen": seen}, categorical=("sex", "seen"))
    assert {"seen=2024-01-01", "seen=2024-02-01", "sex=f", "age"} <= set(data.feature_names)


def test_few_or_repeated_texts_are_categories() -> None:
    codes = [f"{'ABC'[row % 3]}{row % 40}" for row in range(ROWS)]  # 120 rows, 120 // lcm: as many as repeat
    years = [f"{1990 + row % 15}-01-01" for row in range(ROWS)]
    features = encode_columns({"code": codes[:60] * 2, "year": years}, np.arange(ROWS), where="x.csv")
    assert len(features.names) == 60 + 15


def test_frames_are_checked_like_tables() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({**columns(), "seen": pandas.date_range("2024-01-01", periods=ROWS)})
    with pytest.raises(cs.Invalid, match="column 'seen' holds dates"):
        cs.from_frames(frame, "outcome", client="site")
    small = frame.drop(columns="seen")
    for options, said in (
        ({"columns": "age"}, r"columns = 'age' must be a list of names: write \['age'\]"),
        ({"columns": ["age", "outcome"]}, "the column to predict"),
        ({"test_fraction": 2.0}, "test_fraction = 2.0 is out of range"),
        ({"target": "klasses"}, "target = 'klasses' is not one of classes, number"),
    ):
        with pytest.raises(cs.Invalid, match=said):
            cs.from_frames(small, "outcome", client="site", **options)


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    load(tmp_path)
    (tmp_path / "book.xlsx").write_bytes(b"PK\x03\x04" + bytes(40))
    (tmp_path / "torn.csv").write_bytes(b"age,site,outcome\n1\0,a,b\n2,a,c\n")
    (tmp_path / "folder").mkdir()
    for file, said in (
        ("book.xlsx", "is a workbook or archive"),
        ("torn.csv", "line 2 holds a NUL byte"),
        ("folder", "is a folder where a file is needed"),
    ):
        with pytest.raises(cs.Invalid, match=said):
            load(tmp_path, file=file)
