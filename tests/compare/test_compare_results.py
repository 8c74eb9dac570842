"""What is read off a run's rows, and the tables made of it."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from consilience.compare import pages, tables
from consilience.compare.fairness import recorded_differences
from consilience.compare.paired import paired
from consilience.compare.plan import Comparison, plan
from consilience.compare.results import (
    CellResult,
    MethodResult,
    Results,
    Spread,
    qualities,
    qualities_of,
    refuse_questions,
    to_target,
)
from consilience.core.metrics import MetricRow
from consilience.core.settings import Invalid
from consilience.task.kinds import REGRESSION, classification
from consilience.task.task import Task

CLASSES = Task(nn.Linear(1, 2), classification(classes=2)).metrics.rows
ERRORS = Task(nn.Linear(1, 1), REGRESSION).metrics.rows
ACCURACY = CLASSES[1]


def row(number: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    sent = {"bytes_up_total": 1_000_000 * number, "bytes_down_total": 2_000_000 * number}
    return {"round": number, "accuracy": accuracy, "simulated_seconds": 10.0 * number, **sent, **more}


def test_the_target_is_the_first_tested_round_at_or_above_it() -> None:
    rows = [row(1, 0.4), row(2, None), row(3, 0.6), row(4, 0.5), row(5, 0.7)]
    assert to_target(rows, 0.6, ACCURACY) == {"target_rounds": 3, "target_megabytes": 9.0, "target_seconds": 30.0}
    assert to_target(rows, 0.4, ACCURACY)["target_rounds"] == 1  # type: ignore[index]
    assert to_target(rows, 0.71, ACCURACY) is None and to_target(rows, None, ACCURACY) is None
    lower = MetricRow(key="accuracy", title="error", better="lower")
    assert to_target(rows, 0.45, lower)["target_rounds"] == 1  # type: ignore[index]


def test_last_and_best_values_and_clients_by_the_models_they_would_use() -> None:
    plain = {"client_accuracy_mean": 0.3, "client_accuracy_worst_tenth": 0.1, "loss": 2.0}
    rows = [row(1, 0.8, **plain), row(2, 0.6, **plain), row(3, None, client_accuracy_mean=None)]
    assert qualities(rows, CLASSES) == {
        "accuracy": 0.6,
        "best_accuracy": 0.8,
        "clients_mean": 0.3,
        "clients_worst_tenth": 0.1,
        "loss": 2.0,
    }
    personal = {"personal_accuracy_mean": 0.9, "personal_accuracy_worst_tenth": 0.7}
    found = qualities([*rows, row(4, 0.6, **plain, **personal)], CLASSES)
    assert (found["clients_mean"], found["clients_worst_tenth"]) == (0.9, 0.7)
    errors = [
        {"round": n, "loss": 1.0, "absolute_error": e, "client_absolute_error_mean": 2.0}
        for n, e in ((1, 0.5), (2, 0.7))
    ]
    expected = {"loss": 1.0, "absolute_error": 0.7, "best_absolute_error": 0.5, "clients_mean": 2.0}
    assert qualities(errors, ERRORS) == expected


def test_questions_that_the_metrics_cannot_answer_are_refused(two: Comparison) -> None:
    refuse_questions(two, CLASSES)
    refuse_questions(dataclasses.replace(two, target=90.0), ERRORS)
    with pytest.raises(Invalid, match=r"compare.target = 90 is no accuracy: it must be above 0 and at most 1"):
        refuse_questions(dataclasses.replace(two, target=90.0), CLASSES)
    with pytest.raises(Invalid, match=r"metric = 'acuracy' is not one of accuracy, .*did you mean 'accuracy'"):
        refuse_questions(dataclasses.replace(two, metric="acuracy"), CLASSES)


def together(methods: list[MethodResult], metrics: tuple[MetricRow, ...] = CLASSES) -> Results:
    known = qualities_of(metrics)
    return Results(cells=(), methods=tuple(methods), qualities=known, main=known[0])


def test_of_a_regression_the_lowest_error_comes_first(two: Comparison) -> None:
    def method(number: int, error: float) -> MethodResult:
        found = {"absolute_error": Spread.of([error, error]), "loss": Spread.of([1.0, 2.0])}
        return dataclasses.replace(summed(two, number, [0.5, 0.6], 0), qualities=found, against={})

    sheets = tables.sheets(two, together([method(0, 12.0), method(1, 7.5)], ERRORS))
    assert sheets[0].head == ("method", "seeds", "mean absolute error")
    assert sheets[0].rows == (("fedprox", "2", "7.5000 ± 0.0000"), ("fedavg", "2", "12.0000 ± 0.0000"))


def test_spread_is_that_of_a_sample() -> None:
    found = Spread.of([1.0, 3.0])
    assert found is not None and (found.n, found.mean, found.deviation) == (2, 2.0, pytest.approx(2**0.5))
    assert Spread.of([1.0]) == Spread(n=1, mean=1.0, deviation=None) and Spread.of([]) is None


@pytest.fixture
def two(tmp_path: Path) -> Comparison:
    return plan(None, algorithms=["fedavg", "fedprox"], seeds=[0, 1], target=0.9, folder=tmp_path)


def summed(comparison: Comparison, number: int, accuracies: list[float], reached: int) -> MethodResult:
    against = {"accuracy": paired(accuracies, [0.5, 0.6])} if number else {}
    soon = {"target_rounds": Spread(n=reached, mean=4, deviation=1.0)} if reached else {}
    return MethodResult(
        method=comparison.methods[number],
        finished=2,
        diverged=0,
        missing=0,
        personal=bool(number),
        qualities={"accuracy": Spread.of(accuracies), "loss": Spread.of([1.0, 2.0])},  # type: ignore[dict-item]
        budget={"rounds": Spread(n=2, mean=20, deviation=0)},
        reached=reached,
        to_target=soon,
        against=against,
    )


def test_tables_say_what_was_found(two: Comparison) -> None:
    methods = [summed(two, 0, [0.5, 0.6], 0), summed(two, 1, [0.6, 0.7], 2)]
    sheets = {sheet.title.split()[0]: sheet for sheet in tables.sheets(two, together(methods))}
    assert [line[:3] for line in sheets["Quality"].rows] == [
        ("fedprox", "2", "65.0 ± 7.1"),
        ("fedavg", "2", "55.0 ± 7.1"),
    ]
    assert sheets["Accuracy"].rows[0][:2] == ("fedprox", "2") and sheets["Accuracy"].rows[0][2] == "+10.0"
    assert sheets["To"].rows == (("fedprox", "2 of 2", "4 ± 1.0", "n/a"), ("fedavg", "0 of 2", "n/a", "n/a"))
    page = tables.markdown("two", list(sheets.values()), ["a | note"])
    assert "| fedprox | 2 | 65.0 ± 7.1 |" in page and "- a | note" in page
    text = io.StringIO()
    Console(file=text, width=120).print(tables.on_screen(list(sheets.values()), ["[bold]not markup"]))
    assert "[bold]not markup" in text.getvalue() and "65.0 ± 7.1" in text.getvalue()
    narrow = io.StringIO()
    Console(file=narrow, width=48).print(tables.on_screen(list(sheets.values()), []))
    whole = [cell for sheet in sheets.values() for line in sheet.rows for cell in line]
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow.getvalue() and all(cell in narrow.getvalue() for cell in whole)
    lines = list(csv.DictReader(io.StringIO(tables.methods_csv(together(methods)))))
    assert [float(line["accuracy_mean"]) for line in lines] == pytest.approx([0.55, 0.65])
    assert lines[0]["target_rounds_mean"] == ""


def test_what_run_folders_show_to_differ_is_said(two: Comparison) -> None:
    def cell(method: str, seed: int, **more: Any) -> CellResult:
        same: dict[str, Any] = {"trace": "t", "prints": {"partition": "p"}, "parameters": 3, "code": {"torch": "2"}}
        return CellResult(method=method, seed=seed, status="finished", **{**same, **more})

    alike = [cell(name, seed) for seed in (0, 1) for name in ("fedavg", "fedprox")]
    assert recorded_differences(two, alike) == []
    other = [*alike[:3], cell("fedprox", 1, trace="u", prints={"partition": "q"}, parameters=4, code={"torch": "3"})]
    assert recorded_differences(two, other) == [
        "fedprox: who took part in which round differs (seeds 1)",
        "fedprox: the number of parameters differs (seeds 1)",
        "fedprox: partition not the same (seeds 1)",
        "the cells were computed by different versions of the code: see `code` in results.json",
    ]


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_a_label_is_never_a_formula_in_a_spreadsheet(tmp_path: Path, start: str) -> None:
    label = start + 'HYPERLINK("http://example.org","x")'
    file = tmp_path / "compare.toml"
    lines = [f"label = {json.dumps(label)}", 'algorithm = "fedavg"', "[[compare.methods]]", 'algorithm = "fedprox"']
    file.write_text("[compare]\nseeds = [0]\n[[compare.methods]]\n" + "\n".join(lines), encoding="utf-8")
    written = {path.name: path for path in pages.write(plan(file, folder=tmp_path)).files}
    for name in ("methods.csv", "cells.csv"):
        with written[name].open(newline="", encoding="utf-8") as stream:
            labels = [line["method"] for line in csv.DictReader(stream)]
        assert labels == ["'" + label, "fedprox"]
    assert json.loads(written["results.json"].read_text())["methods"][0]["label"] == label  # JSON is no spreadsheet


def test_numbers_stay_numbers_in_csv() -> None:
    cell = CellResult(method="-1", seed=3, status="=1+1", qualities={"loss": -0.5})
    known = qualities_of(CLASSES)
    results = Results(cells=(cell,), methods=(), qualities=known, main=known[0])
    (line,) = csv.DictReader(io.StringIO(tables.cells_csv(results)))
    assert (line["method"], line["status"], line["seed"], line["loss"]) == ("'-1", "'=1+1", "3", "-0.5")
