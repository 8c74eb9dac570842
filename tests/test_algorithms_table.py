"""The table of all methods says what the recipes are: `make docs` writes it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from consilience import algorithms

SCRIPT = Path(__file__).parents[1] / "docs" / "make_algorithms.py"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_algorithms", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def written(make: ModuleType) -> dict[str, dict[str, str]]:
    """The table as it is on the page: method -> column -> cell."""
    text = make.PAGE.read_text(encoding="utf-8")
    inside = text.split(make.BEGIN)[1].split(make.END)[0]
    header, _, *lines = (line.strip("|").split(" | ") for line in inside.strip().splitlines())
    rows = [dict(zip((cell.strip() for cell in header), (cell.strip() for cell in line))) for line in lines]
    return {row["method"].strip("`"): row for row in rows}


def test_every_recipe_has_a_line(written: dict[str, dict[str, str]]) -> None:
    assert list(written) == algorithms.names(), "out of date: run `make docs`"


def test_lines_say_what_the_recipes_are(make: ModuleType, written: dict[str, dict[str, str]]) -> None:
    for name in algorithms.names():
        for column, cell in make.described(name).items():
            assert written[name][column] == cell, f"{name}, {column}: out of date, run `make docs`"


@pytest.mark.parametrize("name", ["fedavg", "fedbuff", "ifca", "local_only", "scaffold"])
def test_some_lines_are_measured_again(name: str, make: ModuleType, written: dict[str, dict[str, str]]) -> None:
    usual = float(make.measured("fedavg")["client work"])
    for column, cell in make.measured(name, usual).items():
        assert written[name][column] == cell, f"{name}, {column}: out of date, run `make docs`"


def test_options_and_parts_are_up_to_date(make: ModuleType) -> None:
    inside = make.PAGE.read_text(encoding="utf-8").split(make.BEGIN_OPTIONS)[1].split(make.END_OPTIONS)[0]
    assert inside.strip() == make.options(), "out of date: run `make docs`"


@pytest.mark.slow
def test_the_whole_page_is_up_to_date(make: ModuleType) -> None:
    text = make.PAGE.read_text(encoding="utf-8")
    assert make.page(text) == text, "out of date: run `make docs`"


def test_known_lines(make: ModuleType, written: dict[str, dict[str, str]]) -> None:
    """Against what is known of these methods, whatever the generator says."""
    assert written["fedavg"]["changes"] == "nothing" and written["fedavg"]["down / up"] == "1 / 1"
    assert written["fedprox"]["changes"] == "term `proximal`" and written["fedprox"]["client work"] == "1"
    assert written["ifca"]["down / up"] == "2 / 1" and written["local_only"]["down / up"] == "0 / 0"
    assert written["scaffold"]["down / up"] == "2 / 2" and "client 1 model" in written["scaffold"]["keeps"]
    assert written["simprox"]["server sees"] == "each reply" and written["fedbuff"]["server sees"] == "a sum"


def test_labels_are_read_over_several_lines(make: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def recipe() -> None:
        """Somebody et al. 1999: w = w.

        Prose.

        Use when: one
            line and another.
        Not when: never | ever.

        More prose.
        """

    monkeypatch.setattr(algorithms, "recipe", lambda name: recipe)
    said = make.sections("any")
    assert said["paper"] == "Somebody et al. 1999" and said["Use when"] == "one line and another"
    assert said["Not when"] == "never \\| ever" and said["Cost"] == make.NONE
