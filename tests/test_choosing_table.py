"""The tables of choosing.md are those of the stored results, and its advice names methods that exist."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from consilience import algorithms

SCRIPT = Path(__file__).parents[1] / "docs" / "make_choosing.py"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_choosing", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(make: ModuleType) -> None:
    assert make.PAGE.read_text(encoding="utf-8") == make.written(), "run `python docs/make_choosing.py`"


def test_differences_are_those_of_the_stored_means(make: ModuleType) -> None:
    """A difference paired by seed is the difference of the means when all seeds are there."""
    for task in make.results():
        by_label = {method["label"]: method for method in task["methods"]}
        base = by_label[task["baseline"]]["qualities"]["accuracy"]["mean"]
        points, _ = make.difference(task, "feddyn", "accuracy")
        assert points == pytest.approx(100 * (by_label["feddyn"]["qualities"]["accuracy"]["mean"] - base), abs=1e-3)


def test_joint_methods_that_the_page_starts_with_are_among_the_best(make: ModuleType) -> None:
    """The short answer rests on the tables: new results that contradict it fail here."""
    best = [label for label, _ in make.ranked("accuracy", personal=False)[:5]]
    assert set(best) == {"feddyn", "fedavgm", "fedyogi", "fedadam", "fedadagrad"}
    assert {label for label, _ in make.ranked("clients_mean", personal=True)[:2]} == {"fedrep", "ditto"}


def test_every_method_named_in_the_advice_exists(make: ModuleType) -> None:
    advice = make.PAGE.read_text(encoding="utf-8").split("## By situation")[1].split("## The evidence")[0]
    starts = re.findall(r"^\| [^|]+ \| ([^|]+) \|", advice, re.M)[1:]
    named = {name for cell in starts for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 15 and named <= set(algorithms.names())
