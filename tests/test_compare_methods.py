"""The comparison of all methods: it runs, goes on where it was stopped, and sums up."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from consilience import algorithms

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "compare_methods.py"


def compare(monkeypatch: pytest.MonkeyPatch, folder: Path, methods: str) -> list[str]:
    """The lines of runs.jsonl after a comparison."""
    options = ["--data", "digits", "--rounds", "2", "--seeds", "2", "--clients", "5", "--model", "logistic"]
    where = ["--lane", "serial", "--device", "cpu", "--methods", methods, "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *options, *where])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return (folder / "runs.jsonl").read_text().splitlines()


def test_it_runs_goes_on_and_sums_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untraced: None) -> None:
    first = compare(monkeypatch, tmp_path, "fedavg,fedbuff")
    runs = [json.loads(line) for line in first]
    assert [run["method"] for run in runs] == ["fedavg", "fedbuff"] * 2 and [run["seed"] for run in runs] == [
        0,
        0,
        1,
        1,
    ]
    assert all(0 < run["accuracy"] <= run["best_accuracy"] and run["megabytes_up"] > 0 for run in runs)
    assert len(runs[0]["curve"]) == 2
    torn = '{"method": "local_only", "se'  # a crash in the middle of a line
    (tmp_path / "runs.jsonl").write_text("\n".join([*first, torn, ""]))
    again = compare(monkeypatch, tmp_path, "fedavg,local_only,bulyan")
    assert again[:4] == first, "finished runs were run again"
    added = [json.loads(line) for line in again[5:]]
    assert [run["method"] for run in added] == ["local_only", "bulyan"] * 2
    assert added[0]["personal_accuracy_mean"] > added[0]["accuracy"]
    table = (tmp_path / "table.md").read_text()
    mean = 50 * (runs[0]["accuracy"] + runs[2]["accuracy"])
    assert f"| `fedavg` | 2 | {mean:.1f} ± " in table and "`duw_fedavg` is left out" in table


def test_every_method_is_compared_or_left_out_for_a_reason() -> None:
    script = runpy.run_path(str(SCRIPT))
    assert set(script["OWN"]) <= set(algorithms.names()) and set(script["LEFT_OUT"]) <= set(algorithms.names())
    for name in set(algorithms.names()) - set(script["LEFT_OUT"]):
        assert script["build"](name, (1, 8, 8)).client.work.trains
