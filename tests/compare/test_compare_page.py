"""The page of a comparison: its tables, notes and figures, with labels as text."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest
from html_pages import EVIL, EVIL_IN_A_DRAWING, alone, without_scripts
from sample_runs import written
from torch import nn

from consilience.compare import drawings, pages, results
from consilience.compare.paired import paired
from consilience.compare.plan import Comparison, plan
from consilience.compare.results import CellResult, MethodResult, Results, Spread, qualities_of
from consilience.core.metrics import MetricRow
from consilience.reporting import report, style
from consilience.task.kinds import REGRESSION, classification
from consilience.task.task import Task

CLASSES = Task(nn.Linear(1, 2), classification(classes=2)).metrics.rows
ERRORS = Task(nn.Linear(1, 1), REGRESSION).metrics.rows
BASE, OTHER = [0.5, 0.6, 0.7], [0.6, 0.8, 0.7]


@pytest.fixture
def hostile(tmp_path: Path) -> Comparison:
    """Two methods with labels that would be markup."""
    file = tmp_path / "compare.toml"
    labels = [f"label = {json.dumps(label)}" for label in (EVIL, EVIL_IN_A_DRAWING)]
    methods = [f'[[compare.methods]]\nalgorithm = "fedavg"\n{label}\n' for label in labels]
    file.write_text("[compare]\nseeds = [0, 1, 2]\n" + "".join(methods), encoding="utf-8")
    return plan(file, folder=tmp_path)


def made(comparison: Comparison, metrics: tuple[MetricRow, ...] = CLASSES) -> Results:
    """What the runs came to: three seeds of each, paired."""
    known = qualities_of(metrics)
    main = known[0]
    cells, methods = [], []
    for method, values in zip(comparison.methods, (BASE, OTHER)):
        cells += [
            CellResult(method=method.label, seed=seed, status="finished", qualities={main.key: value})
            for seed, value in enumerate(values)
        ]
        spread = Spread.of(values)
        assert spread is not None
        methods.append(
            MethodResult(
                method=method,
                finished=3,
                diverged=0,
                missing=0,
                personal=False,
                qualities={main.key: spread},
                budget={},
                reached=0,
                to_target={},
                against={main.key: paired(values, BASE)} if values is OTHER else {},
            )
        )
    return Results(cells=tuple(cells), methods=tuple(methods), qualities=known, main=main)


def test_labels_are_text_in_tables_notes_and_figures(hostile: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(results, "collect", made)
    written = {path.name: path for path in pages.write(hostile).files}
    text = written["comparison.html"].read_text()
    alone(text)
    assert "<script" not in without_scripts(text) and html.escape(EVIL) in text and text.count("<svg") == 2
    assert "70.0 ±\N{NO-BREAK SPACE}10.0" in text and "+10.0" in text and "n = 3 seeds is too small" in text
    assert "Quality after the last round in %" in text and "p (exact)" in text


def test_figures_show_every_seed_and_the_paired_differences(hostile: Comparison) -> None:
    pytest.importorskip("matplotlib")
    found = made(hostile)
    with style.drawing():
        values, differences = drawings.figures(hostile, found)
        dots = [points.get_offsets()[:, 0].tolist() for points in values.figure.axes[0].collections]
        assert dots == [pytest.approx([60, 80, 70]), pytest.approx([50, 60, 70])]  # the better mean is on top
        assert values.figure.axes[0].get_xlabel() == "accuracy (%)"
        (zero, interval), (mean,) = differences.figure.axes[0].lines, differences.figure.axes[0].collections
        test = found.methods[1].against["accuracy"]
        assert zero.get_xdata() == [0, 0] and test.low is not None and test.high is not None
        assert interval.get_xdata() == pytest.approx([100 * test.low, 100 * test.high])
        assert mean.get_offsets()[0, 0] == pytest.approx(10)
        assert "lies right of" in differences.caption
        errors = drawings.figures(hostile, made(hostile, ERRORS))
    assert "lies left of" in errors[1].caption and "lower is better" in errors[0].caption
    assert [points.get_offsets()[0, 0] for points in errors[0].figure.axes[0].collections] == [0.5, 0.6]


def test_before_the_first_run_and_without_matplotlib_there_are_no_figures(
    hostile: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.write(hostile)
    text = (hostile.folder / "comparison.html").read_text()
    alone(text)
    assert "<svg" not in text and "0 of 6" in text
    monkeypatch.setattr(report, "is_possible", lambda: False)
    monkeypatch.setattr(results, "collect", made)
    pages.write(hostile)
    text = (hostile.folder / "comparison.html").read_text()
    assert "<svg" not in text and "consilience[report]" in text and "70.0" in text


def test_learning_curves_have_the_colours_and_links_of_their_methods(hostile: Comparison) -> None:
    long = f"a label of more than forty-two characters: {EVIL}"
    for method, label in zip(hostile.methods, (long, "short")):
        object.__setattr__(method, "label", label)
    cells = {"b": {"method": long}, "a": {"method": "short"}}  # folders in another order than methods
    (hostile.folder / "plan.json").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    for name in cells:
        written(hostile.folder, name, algorithm="fedavg" if name == "a" else "fedprox")
    found = {figure.name: figure.chart for figure in drawings.figures(hostile, made(hostile))}
    assert list(found) == ["values", "differences", "accuracy", "accuracy_against_traffic", "accuracy_against_time"]
    looks = {strip.link: strip.look for strip in found["values"].strips}
    for name in ("accuracy", "accuracy_against_traffic"):
        assert {series.link: series.look for series in found[name].series} == looks
