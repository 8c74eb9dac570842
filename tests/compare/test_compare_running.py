"""Comparisons as a user runs them: same federation for all, nothing twice, stopped and gone on, in two processes."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from consilience.compare import pages, results, running
from consilience.compare.command import carry_out
from consilience.compare.plan import Comparison, plan
from consilience.core.settings import Invalid
from consilience.experiments import runner
from consilience.runs.folder import RecordError, RunFolder
from consilience.runs.lock import RunLock, RunLocked

ROOT = Path(__file__).parents[2]
SMALL = [
    "algorithm=fedavg",
    "algorithm.selection.name=uniform",
    "algorithm.selection.count=3",
    "algorithm.epochs=1",
    "rounds=3",
    "partition.clients=6",
    "model=logistic",
    "engine.lane=serial",
    "engine.device=cpu",
    "threads=1",
]
pytestmark = pytest.mark.usefixtures("untraced")


def small(folder: Path, *overrides: str, **more: Any) -> Comparison:
    options: dict[str, Any] = {"algorithms": ["fedavg", "fedprox", "ditto"], "seeds": [0, 1], **more}
    return plan(None, [*SMALL, *overrides], folder=folder, **options)


def executed(comparison: Comparison, jobs: int = 1) -> dict[str, str]:
    ended = running.execute(comparison, jobs=jobs, console=Console(file=io.StringIO()))
    return {name: found.status for name, found in ended.items()}


def digests(comparison: Comparison) -> dict[str, str]:
    """Metrics of every cell, byte for byte."""
    files = {cell.name: comparison.folder / cell.name / "metrics.jsonl" for cell in comparison.cells}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    comparison = small(tmp_path_factory.mktemp("compare") / "whole")
    assert set(executed(comparison).values()) == {"finished"}
    return comparison


def test_cells_share_partition_start_and_trace(whole: Comparison) -> None:
    cells = {cell.name: RunFolder.open(whole.folder / cell.name) for cell in whole.cells}
    for seed in (0, 1):
        mine = [cells[f"{name}-seed{seed}"] for name in ("fedavg", "fedprox", "ditto")]
        assert len({folder.facts()["prints"]["partition"] for folder in mine}) == 1
        traces = [[row["cohort"] for row in folder.rows().rows] for folder in mine]
        assert traces[0] == traces[1] == traces[2] and all(len(ids) == 3 for ids in traces[0])
        assert mine[0].facts()["comparison"] == {"method": "fedavg", "seed": seed}
    assert cells["fedavg-seed0"].facts()["prints"] != cells["fedavg-seed1"].facts()["prints"]


def test_a_cell_is_the_run_that_its_settings_give(whole: Comparison, tmp_path: Path) -> None:
    cell = whole.cells[1]
    alone = runner.execute(cell.config, folder=tmp_path / "alone")
    assert alone.folder is not None
    assert (alone.folder / "metrics.jsonl").read_bytes() == (whole.folder / cell.name / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [("fedavg-seed0", "fedprox-seed0", "method: "), ("fedavg-seed0", "fedavg-seed1", "seed: ")],
)
def test_cells_in_each_others_place_are_refused(
    whole: Comparison, tmp_path: Path, one: str, other: str, why: str
) -> None:
    folder = Path(shutil.copytree(whole.folder, tmp_path / "c"))
    (folder / one).rename(folder / "x")
    (folder / other).rename(folder / one)
    (folder / "x").rename(folder / other)
    with pytest.raises(RecordError, match=rf"does not hold the run of .*{why}"):
        results.collect(dataclasses.replace(whole, folder=folder))
    assert results.collect(whole).cells


def test_methods_start_from_the_same_model(tmp_path: Path) -> None:
    """Without a step all methods test the model they began with."""
    overrides = ["rounds=1", "environment.steps=[0, 0, 0, 0, 0, 0]"]
    comparison = small(tmp_path / "c", *overrides, algorithms=["fedavg", "simprox", "scaffold"], seeds=[0, 1])
    executed(comparison)
    losses = {c.name: RunFolder.open(comparison.folder / c.name).rows().rows[-1]["loss"] for c in comparison.cells}
    assert losses["fedavg-seed0"] == pytest.approx(losses["simprox-seed0"], abs=1e-6)
    assert losses["fedavg-seed0"] == pytest.approx(losses["scaffold-seed0"], abs=1e-6)
    assert abs(losses["fedavg-seed0"] - losses["fedavg-seed1"]) > 1e-3


def test_finished_cells_are_never_run_again_and_new_ones_are_added(whole: Comparison) -> None:
    before = digests(whole)
    times = {cell.name: (whole.folder / cell.name / "run.json").stat().st_mtime_ns for cell in whole.cells}
    assert executed(whole) == {}
    more = small(whole.folder, algorithms=["fedavg", "fedprox", "ditto", "fedavgm"], seeds=[0, 1])
    assert executed(more) == {"fedavgm-seed0": "finished", "fedavgm-seed1": "finished"}
    assert digests(whole) == before
    assert times == {cell.name: (whole.folder / cell.name / "run.json").stat().st_mtime_ns for cell in whole.cells}


def test_a_changed_comparison_is_refused_with_its_keys(whole: Comparison) -> None:
    for override, key in (("algorithm.lr=0.3", "algorithm.lr: 0.2 -> 0.3"), ("rounds=4", "rounds: 3 -> 4")):
        with pytest.raises(Invalid, match=f"fedavg-seed0: {key}"):
            executed(small(whole.folder, override))


def test_a_half_finished_cell_goes_on_exactly(whole: Comparison, tmp_path: Path) -> None:
    comparison = small(tmp_path / "half")
    cell = comparison.cells[2]
    with runner.start(cell.config, folder=comparison.folder / cell.name) as run:
        run.folder.record(status="running")
        next(iter(run.observations()))  # as if killed after the first round
    assert len(RunFolder.open(comparison.folder / cell.name).rows().rows) == 1
    assert set(executed(comparison).values()) == {"finished"}
    assert digests(comparison) == digests(whole)


@pytest.mark.slow
def test_two_processes_give_the_same_numbers(whole: Comparison, tmp_path: Path) -> None:
    comparison = small(tmp_path / "two")
    assert set(executed(comparison, jobs=2).values()) == {"finished"}
    assert digests(comparison) == digests(whole)


def test_everything_is_checked_before_the_first_cell(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="fedsiam_da, seed 0: algorithm: "):  # it needs a model with two branches
        executed(small(tmp_path / "siamese", algorithms=["fedavg", "fedsiam_da"]))
    with pytest.raises(Invalid, match=r"selection.count = 7 is more than the 6 clients"):
        executed(small(tmp_path / "count", "algorithm.selection.count=7"))
    assert not list(tmp_path.glob("*/*seed*"))


def test_one_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    comparison = small(tmp_path / "c", "rounds=6", grids=["fedprox.lr=1e30"], seeds=[0])
    assert executed(comparison) == {"fedavg-seed0": "finished", "fedprox-seed0": "diverged", "ditto-seed0": "finished"}
    assert executed(comparison) == {}, "it would diverge again"
    pages.write(comparison)
    page = (comparison.folder / "table.md").read_text()
    assert "fedprox: 1 of its runs diverged" in page and "| fedprox | 0 (1 diverged) | n/a |" in page


def test_two_comparisons_do_not_run_in_one_folder(tmp_path: Path) -> None:
    comparison = small(tmp_path / "c")
    comparison.folder.mkdir()
    code = "import sys\nfrom pathlib import Path\nfrom consilience.runs.lock import RunLock\n"
    code += "RunLock(Path(sys.argv[1])).acquire()\nprint('held', flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(comparison.folder / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(RunLocked, match=str(other.pid)):
            executed(comparison)
    RunLock(comparison.folder / "lock").acquire().release()


def test_pages_hold_what_the_cells_came_to(whole: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    assert carry_out(whole, 1, quiet=False) == 0
    printed = capsys.readouterr().out
    assert "Quality after the last round" in printed and "Budget used" in printed
    found = json.loads((whole.folder / "results.json").read_text())
    rows = [RunFolder.open(whole.folder / f"ditto-seed{seed}").rows().rows[-1] for seed in (0, 1)]
    ditto = next(method for method in found["methods"] if method["label"] == "ditto")
    assert ditto["qualities"]["accuracy"]["mean"] == pytest.approx(np.mean([row["accuracy"] for row in rows]))
    own = [row["personal_accuracy_mean"] for row in rows]
    assert ditto["personal"] and ditto["qualities"]["clients_mean"]["mean"] == pytest.approx(np.mean(own))
    assert ditto["against"]["accuracy"]["n"] == 2 and ditto["budget"]["client_epochs"]["mean"] == 9
    assert not (whole.folder / "fedavg-seed0" / "results.json").exists()


@pytest.mark.slow
def test_cells_that_train_together_come_to_the_same(tmp_path: Path) -> None:
    """In float64 the curves agree to rounding; those that were begun alone go on alone."""
    exact = ["engine.lane=batched", "engine.dtype=float64", "checkpoint.every=3"]
    alone, joint = small(tmp_path / "alone", *exact), small(tmp_path / "joint", *exact)
    executed(alone)
    with runner.start(joint.cells[0].config, folder=joint.folder / joint.cells[0].name) as run:
        run.folder.record(status="running")
        next(iter(run.observations()))
    ended = running.execute(joint, jobs=1, console=Console(file=io.StringIO()), together=4)
    assert {found.status for found in ended.values()} == {"finished"} and len(ended) == 6
    for cell in alone.cells:
        mine, theirs = (RunFolder.open(c.folder / cell.name).rows().rows for c in (joint, alone))
        assert [row["cohort"] for row in mine] == [row["cohort"] for row in theirs]
        for key in ("loss", "train_loss", "drift"):
            assert [row[key] for row in mine] == pytest.approx([row[key] for row in theirs], rel=1e-12), cell.name
    assert RunFolder.open(joint.folder / joint.cells[1].name).facts()["comparison"]["together"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--jobs", "1"], ["--jobs", "2"], ["--together", "4"]], ids=" ".join)
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path: Path, how: list[str]) -> None:
    command = [sys.executable, "-m", "consilience", "compare", *SMALL, "rounds=60", "--algorithms", "fedavg,fedprox"]
    command += ["--seeds", "0,1", *how, "--out", str(tmp_path / "c")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not any(f.stat().st_size for f in (tmp_path / "c").glob("*/metrics.jsonl")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 143
    states = {f.parent.name: json.loads(f.read_text())["status"] for f in (tmp_path / "c").glob("*/run.json")}
    assert "interrupted" in states.values() and "running" not in states.values()
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [len(f.read_text().splitlines()) for f in (tmp_path / "c").glob("*/metrics.jsonl")]
    assert rows == [60] * 4
