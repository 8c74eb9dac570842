"""The table of packages in docs/architecture.md says what is there; sizes may lag behind by a twentieth."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from consilience import algorithms

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_architecture", DOCS / "make_architecture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(table: str) -> list[list[str]]:
    plain = table.replace("\\|", "/").strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in plain]


def test_packages_purposes_and_imports_are_up_to_date(maker: ModuleType) -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    shown = cells(page.partition(maker.BEGIN)[2].partition(maker.END)[0])
    found = cells(maker.table())
    hint = "run `make docs`"
    assert [(row[0], row[1], row[4]) for row in shown] == [(row[0], row[1], row[4]) for row in found], hint
    for before, now in zip(shown, found):
        for column in (2, 3):
            size, wanted = (int(row[column].replace(",", "")) for row in (before, now))
            assert abs(size - wanted) <= max(2, 0.05 * wanted), f"{now[0]}: {hint}"


def test_subjects_of_core_are_up_to_date(maker: ModuleType) -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    shown = cells(page.partition(maker.CORE_BEGIN)[2].partition(maker.CORE_END)[0])
    for before, now in zip(shown, cells(maker.core_table()), strict=True):
        assert before[:2] == now[:2], "run `make docs`"
        size, wanted = (int(row[2].replace(",", "")) for row in (before, now))
        assert abs(size - wanted) <= 0.05 * wanted, "run `make docs`"


def test_readme_and_overview_count_the_algorithms(maker: ModuleType) -> None:
    for page in maker.COUNTING:
        text = page.read_text(encoding="utf-8")
        assert f"{len(algorithms.names())} algorithms" in text and maker.counted(text) == text, "run `make docs`"
