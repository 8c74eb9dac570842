"""The table of models.md is that of the stored results, and says nothing that a reader cannot understand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs" / "make_models.py"


def test_up_to_date_and_every_cell_is_explained() -> None:
    spec = importlib.util.spec_from_file_location("make_models", SCRIPT)
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert make.main(["--check"]) == 0, "run python docs/make_models.py"
    cells = {
        cell.strip() for line in make.table().splitlines() if line.startswith("| ") for cell in line.split("|")[2:-1]
    }
    known = {"yes", "-", *(words for _, words in make.REASONS)}
    assert {cell for cell in cells if "`" not in cell} <= known
