"""The tables of comparison.md and the packaged evidence are those of the stored results, and no method is forgotten."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from consilience import algorithms

DOCS = Path(__file__).parents[1] / "docs"
SCRIPT = DOCS / "make_comparison.py"
APART = {
    *("dp_fedavg", "duw_fedavg", "duw_fednova"),  # spends privacy; need a learned schedule
    *("fedit", "ffa_lora", "flora", "flexlora", "hetlora"),  # need a model with adapters
}
NEWER = {"fedaf", "feddf", "fedma"}  # than two of the studies
LEFT_OUT = {"banking77": {"feddm", *NEWER}, "domains": {"feddm", *NEWER}}  # condensing takes minutes a run on a CPU


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_comparison", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_and_the_evidence_are_up_to_date(make: ModuleType) -> None:
    for file, text in make.written().items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name}: run `python docs/make_comparison.py`"


def test_every_method_is_in_every_tuned_task(make: ModuleType) -> None:
    for name in make.TITLES:
        assert sorted(make.methods_of(name)) == sorted(set(algorithms.names()) - APART - LEFT_OUT.get(name, set()))


def test_methods_tuned_later_replace_or_join_the_stored_ones(make: ModuleType) -> None:
    same = {"trials": 12, "tuning_seeds": [9], "validation": 0.2, "seeds": [0], "rounds": 3, "baseline": "a"}
    old = {**same, "torch": ["1"], "methods": [{"label": "a"}, {"label": "c", "validation": 0.1}]}
    new = {
        **same,
        "task": "t",
        "torch": ["2"],
        "methods": [{"label": "a", "validation": 0.5}, {"label": "b"}, {"label": "c"}],
    }
    found = make._replaced(old, new, ["b", "c"])
    assert found["methods"] == [{"label": "a"}, {"label": "b"}, {"label": "c"}]
    assert (found["added"], found["tuned_again"], found["torch"]) == (["b"], ["c"], ["1", "2"])
    with pytest.raises(SystemExit, match="trials is 9 and was 12"):
        make._replaced(old, {**new, "trials": 9}, ["b"])


def test_stored_results_hold_what_their_comparison_found(make: ModuleType) -> None:
    for task in make.results():
        labels = [method["label"] for method in task["methods"]]
        assert task["baseline"] in labels and not set(task["seeds"]) & set(task["tuning_seeds"])
        for method in task["methods"]:
            assert bool(method["against"]) == (method["label"] != task["baseline"] and method["finished"] > 0)
            assert method["validation"] is None or 0 <= method["validation"] <= 1


def test_the_picture_of_the_readme_is_drawn_from_the_stored_results() -> None:
    spec = importlib.util.spec_from_file_location("make_picture", DOCS / "make_picture.py")
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.TARGET.read_text(encoding="utf-8") == maker.drawing(), "run `make docs`"
    assert maker.TARGET.relative_to(DOCS.parent).as_posix() in (DOCS.parent / "README.md").read_text(encoding="utf-8")
