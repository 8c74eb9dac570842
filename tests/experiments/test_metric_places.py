"""Every built-in metric in every place: record, eval, compare, report and trackers.

Flower is in tests/flower/engine/test_kinds_through_flower.py, Ray in tests/engines/test_ray.py, values against
scikit-learn in tests/task/test_measures.py.
"""

from __future__ import annotations

import csv
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from consilience.compare.command import carry_out
from consilience.compare.plan import plan
from consilience.experiments import trackers
from consilience.experiments.config import config
from consilience.experiments.retest import retest
from consilience.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("untraced")
RECIPES = Path(__file__).parents[2] / "recipes"
BINNED = ("auroc", "auroc_error", "average_precision", "average_precision_error")
MACRO = ("precision", "recall", "f1")
CASES: list[tuple[str, str, tuple[str, ...]]] = [
    (
        "quickstart",
        '["per_class", "top_3", "auroc", "iou"]',
        ("accuracy", *MACRO, "calibration_error", "top_3", "recall_7", "iou", *BINNED),
    ),
    (
        "kind_multi_label_quick",
        '["per_class"]',
        ("accuracy", *MACRO, "micro_f1", "exact_match", "calibration_error", *BINNED),
    ),
    ("kind_regression_quick", "[]", ("absolute_error", "rmse", "r2")),
    ("kind_token_labels_quick", '["top_2"]', ("accuracy", "perplexity", "bits_per_token", "top_2", *MACRO)),
    ("kind_next_token_quick", "[]", ("accuracy", "perplexity", "bits_per_token")),
    ("kind_dense_quick", '["per_class"]', ("accuracy", "iou", "dice", "calibration_error")),
]


QUICK = ("quickstart", "kind_dense_quick")


@pytest.mark.parametrize(
    ("recipe", "wanted", "keys"),
    [pytest.param(*case, id=case[0], marks=() if case[0] in QUICK else pytest.mark.slow) for case in CASES],
)
def test_metrics_are_recorded_tested_again_compared_reported_and_tracked(
    recipe: str, wanted: str, keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("rounds=1", "engine.lane=serial", "engine.device=cpu", "threads=1", f"task.metrics={wanted}")
    cells = plan(RECIPES / f"{recipe}.toml", asked, algorithms=["fedavg"], seeds=[0], folder=tmp_path / "cells")
    assert carry_out(cells, jobs=1, quiet=True) == 0
    (file,) = (tmp_path / "cells").rglob("metrics.jsonl")
    folder = RunFolder.open(file.parent)
    row = folder.rows().rows[-1]
    assert all(isinstance(row[key], float) for key in keys), row

    again = retest(file.parent).scores
    assert {key: again[key] for key in keys} == {key: row[key] for key in keys}

    (line,) = csv.DictReader((tmp_path / "cells" / "cells.csv").read_text().splitlines())
    assert {key: float(line[key]) for key in keys} == pytest.approx({key: row[key] for key in keys})

    from consilience.reporting.report import write

    page = write([file.parent], tmp_path / "report.html", pictures=False).read_text()
    titles = {entry["name"]: entry["title"] for entry in folder.facts()["metrics"]}
    missing = [key for key in keys if f">{titles[key]}</th>" not in page]
    assert not missing, "a column of an overview, or a line of the further metrics"

    logged: dict[str, float] = {}
    writer = types.SimpleNamespace(
        add_scalar=lambda key, value, step: logged.update({key: value}),
        file_writer=types.SimpleNamespace(add_summary=lambda summary: None),
        **dict.fromkeys(("add_text", "flush", "close"), lambda *_: None),
    )
    module = types.SimpleNamespace(SummaryWriter=lambda log_dir="": writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    summaries = types.SimpleNamespace(hparams=lambda settings, metrics: ("table", "settings", "end"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.summary", summaries)
    log: Any = config.load(None, ["log=tensorboard"]).log
    tracker = trackers.opened(log, folder, {})
    assert tracker is not None
    tracker.add(row)
    tracker.finish("finished")
    found = {name.rpartition("/")[2]: value for name, value in logged.items()}
    assert {key: found[key] for key in keys} == {key: row[key] for key in keys}
