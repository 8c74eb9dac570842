"""Figures that answer: their data are in the page, the page is the same each time, small, and runs nothing else."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from html_pages import alone, figure_data, without_scripts
from sample_runs import CONFIG, written
from typer.testing import CliRunner

from consilience import cli
from consilience.reporting import charts, interactive, report
from consilience.reporting.charts import Axis, Figure, Heat, Lines, Scale, Series
from consilience.runs.folder import RunFolder

pytest.importorskip("matplotlib", reason='needs pip install "consilience[report]"')
pytest.importorskip("plotly", reason='needs pip install "consilience[report]"')


def test_the_page_has_the_numbers_of_its_figures(tmp_path: Path) -> None:
    runs = [
        written(tmp_path, f"{name}{seed}", algorithm=name, seed=seed) for name, seed in (("a", 0), ("a", 1), ("b", 0))
    ]
    text = report.write(runs, tmp_path / "page.html", pictures=False).read_text()
    alone(text)
    found = figure_data(text)
    first, second = found["accuracy"]["series"]
    assert (first["name"], first["x"], first["y"]) == ("a", [1, 2, 3], [0.2, 0.4, 0.6])
    assert first["bands"][0]["low"] == [0.2, 0.4, 0.6] and second["link"] == "method:b" != first["link"]
    assert found["accuracy"]["y"]["title"] == "test accuracy" and found["accuracy"]["x"]["title"] == "round"
    weights = found["1_weights"]["values"]
    assert weights[0] == [0.25] * 3 and weights[1] == [None] * 3 and weights[2] == [0.75] * 3
    names = [tag.split('"')[1] for tag in text.split("<figure data-figure=")[1:] if tag.startswith('"')]
    assert set(names) == set(found) and 'data-link="method:b"' in text


def test_static_pages_and_pages_without_plotly_have_pictures_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = written(tmp_path, "a")
    done = CliRunner().invoke(cli.app, ["report", str(run), "--static", "--no-pictures", "--out", "a.html"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "a.html").read_text()
    alone(text)
    assert "<script" not in text and "<svg" in text and interactive.MISSING[:20] not in text
    monkeypatch.setattr(interactive, "_plotly_file", lambda: None)
    text = report.write([run], pictures=False).read_text()
    alone(text)
    assert "<script" not in text and "<svg" in text and "These figures are pictures: pip install" in text


def test_numbers_are_short_and_json_knows_them() -> None:
    assert charts.plain([1.0, 0.123456789, np.nan, np.inf, 1e20]) == [1, 0.12346, None, None, 1e20]


def test_where_there_is_little_room_large_figures_stay_pictures() -> None:
    noise = np.random.default_rng(0).random((60, 60))
    heat = Heat(values=noise, down=Axis("client"), across=Axis("round"), scale=Scale("weight"))
    line = Lines(series=[Series(x=[1, 2], y=[3.0, 4.0])], x=Axis("round"), y=Axis("loss"))
    large, small = (Figure(name=n, title=n, caption=n, chart=c) for n, c in (("large", heat), ("small", line)))
    most = len(interactive.source()) + len(interactive._packed_plotly())
    found = interactive.bundle([large, small], room=most + 1000)
    assert found is not None and found.left_out == 1
    assert list(json.loads(interactive.unpacked(found.data))) == ["small"]
    assert interactive.bundle([large, small], room=most) is None


def test_where_there_is_little_room_the_first_figures_of_a_page_are_interactive() -> None:
    values = np.random.default_rng(0).random((12, 200))
    charts_ = [Lines(series=[Series(x=range(200), y=row)], x=Axis("round"), y=Axis("loss")) for row in values]
    figures = [Figure(name=f"{n:02}", title="", caption="", chart=chart) for n, chart in enumerate(charts_)]
    most = len(interactive.source()) + len(interactive._packed_plotly())
    whole = len(interactive.packed(interactive.data(figures).encode()))
    found = interactive.bundle(figures, room=most + whole // 2)
    assert found is not None and len(found.data) <= whole // 2
    kept = list(json.loads(interactive.unpacked(found.data)))
    assert kept == [figure.name for figure in figures][: len(kept)] and 4 <= len(kept) <= 6


def large(root: Path, *, clients: int, rounds: int) -> Path:
    """A run with everything a page can show: noise, which cannot be compressed."""
    rng = np.random.default_rng(0)
    text = CONFIG.format(seed=0, algorithm="fedavg").replace("rounds = 3", f"rounds = {rounds}")
    folder = RunFolder.create(root, "large", text, {"status": "finished", "clients": clients})
    everyone, m = list(range(clients)), min(clients, 64)
    for n in range(1, rounds + 1):
        row = {"round": n, "accuracy": rng.random(), "loss": 1 / n, "train_loss": 1 / n, "cohort": everyone}
        row |= {"weights": rng.dirichlet(np.ones(clients)).tolist(), "bytes_up_total": n, "bytes_down_total": n}
        folder.metrics.append(row, sync=False)
        known = {"round": n, "accuracy": np.round(rng.random(clients), 4).tolist()}
        if n % 5 == 0:
            unit = rng.normal(size=(m, 64))
            unit /= np.linalg.norm(unit, axis=1, keepdims=True)
            parts = {"cosines": (unit @ unit.T)[np.tril_indices(m, -1)], "projections": unit}
            known["updates"] = {"clients": everyone[:m], "lengths": [1.0] * m}
            known["updates"] |= {k: base64.b64encode(v.astype("<f2").tobytes()).decode() for k, v in parts.items()}
        folder.clients.append(known, sync=False)
    facts = {"names": [f"hospital {k}" for k in everyone], "labels": [], "train_rows": [k + 1 for k in everyone]}
    folder.federation.write_text(json.dumps(facts | {"class_counts": rng.integers(0, 50, (clients, 10)).tolist()}))
    return folder.path


@pytest.mark.slow
def test_a_large_record_makes_a_page_below_five_megabytes(tmp_path: Path) -> None:
    text = report.write([large(tmp_path, clients=200, rounds=500)], pictures=False).read_text()
    alone(text)
    assert len(text.encode()) < 5_000_000
    found = figure_data(text)
    assert {"map", "transfer", "weights", "each_accuracy", "accuracy"} <= set(found)
    assert len(found["weights"]["values"]) == 200 and len(found["weights"]["values"][0]) == 500
    assert "<svg" in without_scripts(text)
