"""Studies as a user makes them: equal budgets, the same trials however they are stopped, and compare's use of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from consilience import cli
from consilience.compare import pages as compare_pages
from consilience.compare import running as comparing
from consilience.compare import tuned
from consilience.compare.plan import plan as plan_comparison
from consilience.core.settings import Invalid
from consilience.runs.folder import RunFolder
from consilience.runs.lock import RunLock, RunLocked
from consilience.runs.row_log import RecordError
from consilience.tuning import sampling, trials
from consilience.tuning.plan import Tuning, plan
from consilience.tuning.running import execute
from consilience.tuning.tune import tune

optuna = pytest.importorskip("optuna")

ROOT = Path(__file__).parents[2]
SMALL = ["algorithm=fedavg", "algorithm.epochs=1", "rounds=3", "partition.clients=4", "model=logistic"]
SMALL += ["engine.lane=serial", "engine.device=cpu", "threads=1", "algorithm.lr=0.3"]
pytestmark = pytest.mark.usefixtures("untraced")


def small(folder: Path, *overrides: str, **more: Any) -> Tuning:
    settings: dict[str, Any] = {"algorithms": ["fedavg", "fedprox"], "trials": 3, "pruner": "none", **more}
    return plan(None, [*SMALL, *overrides], folder=folder, **settings)


def executed(tuning: Tuning, **more: Any) -> list[str]:
    lines: list[str] = []
    made = execute(tuning, notify=lambda label, number, text: lines.append(f"{label} {number} {text}"), **more)
    assert made.complete and not made.problems
    return lines


def tried(folder: Path) -> dict[str, list[tuple[str, float | None, dict[str, Any]]]]:
    found = tuned.read(folder)
    return {m.label: [(t.state, t.value, t.options) for t in m.trials] for m in found.methods}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    tuning = small(tmp_path_factory.mktemp("tune") / "whole")
    assert len(executed(tuning)) == 6
    return tuning


def test_a_changed_study_is_refused(whole: Tuning, tmp_path: Path) -> None:
    data = (whole.folder / tuned.NAME).read_bytes()
    assert data.count(b"0.3") >= 2
    (tmp_path / tuned.NAME).write_bytes(data.replace(b"0.3", b"0.4", 1))
    with pytest.raises(RecordError, match=r"tuned.json is damaged: its digest is not that of its content"):
        tuned.read(tmp_path)


def test_every_method_has_the_same_budget_and_its_first_trial_is_the_untuned_one(whole: Tuning) -> None:
    found = tuned.read(whole.folder)
    assert [len(method.trials) for method in found.methods] == [3, 3] and found.trials == 3
    assert found.of("fedavg").trials[0].options == {"lr": 0.3}
    assert found.of("fedprox").trials[0].options == {"mu": 0.1, "lr": 0.3}
    for method in found.methods:
        values = [trial.value for trial in method.trials if trial.value is not None]
        assert method.best == max(values) and len(values) == 3
        assert method.curve() == [max(values[: n + 1]) for n in range(3)]
        best = next(trial for trial in method.trials if trial.value == method.best)
        assert method.options == best.options
        for trial in method.trials:
            assert all(method.ranges[key]["low"] <= v <= method.ranges[key]["high"] for key, v in trial.options.items())


def test_a_trial_is_an_ordinary_run_on_validation_rows(whole: Tuning) -> None:
    method = tuned.read(whole.folder).of("fedprox")
    folder = RunFolder.open(whole.folder / "fedprox" / "trial0002-seed1000")
    settings = folder.facts()["config"]
    assert settings["evaluation"]["validation"] == 0.2 and settings["seed"] == 1000 and settings["rounds"] == 3
    assert {key: settings["algorithm"][key] for key in ("mu", "lr")} == method.trials[2].options
    assert folder.rows().rows[-1]["accuracy"] == method.trials[2].value


@pytest.mark.slow
def test_processes_and_other_methods_do_not_change_what_is_tried(whole: Tuning, tmp_path: Path) -> None:
    beside = small(tmp_path / "beside")
    executed(beside, jobs=2)
    assert tried(beside.folder) == tried(whole.folder)
    alone = small(tmp_path / "alone", algorithms=["fedprox"])
    executed(alone)
    assert tried(alone.folder)["fedprox"] == tried(whole.folder)["fedprox"]


def test_a_stopped_study_goes_on_exactly(whole: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = small(tmp_path / "study")
    clock = iter([*[0.0] * 5, *[1e12] * 100])  # asked three times a trial: the time is up in the middle of one
    with monkeypatch.context() as patched:
        patched.setattr(trials, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        made = execute(tuning, notify=lambda *_: None, minutes=1)
    done = len(tried(tuning.folder)["fedavg"])
    assert not made.complete and not made.signal and 0 < done < 3
    assert tuned.read(tuning.folder).of("fedprox").options is None
    executed(small(tmp_path / "study"))
    assert tried(tuning.folder) == tried(whole.folder)
    assert executed(small(tmp_path / "study")) == []  # nothing is tried twice


@pytest.mark.slow
def test_a_killed_study_goes_on_exactly(whole: Tuning, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    arguments = [sys.executable, "-m", "consilience", "tune", *SMALL, "--algorithms", "fedavg,fedprox", "--trials", "3"]
    arguments += ["--pruner", "none", "--out", str(folder)]
    with subprocess.Popen(arguments, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        deadline = time.monotonic() + 100
        while not (folder / "fedavg" / "trial0001-seed1000" / "metrics.jsonl").exists():
            assert process.poll() is None and time.monotonic() < deadline
        process.kill()
    with (folder / "fedavg" / sampling.JOURNAL).open("ab") as journal:
        journal.write(b'{"op_code": 6, "worker')  # a record that was not finished
    executed(small(folder))
    assert tried(folder) == tried(whole.folder)


def test_trials_that_fall_behind_are_cut_short_but_not_early(tmp_path: Path) -> None:
    ranges = {"lr": {"low": 1e-4, "high": 1.0, "log": True}}
    more: dict[str, Any] = {"algorithms": ["fedavg"], "trials": 8, "pruner": "median", "ranges": ranges}
    tuning = small(tmp_path / "pruned", "rounds=4", **more)
    executed(tuning)
    method = tuned.read(tuning.folder).of("fedavg")
    assert len(method.trials) == 8 and 0 < method.counted("pruned") < 6
    for trial in method.trials:
        rows = RunFolder.open(tuning.folder / "fedavg" / f"trial{trial.number:04d}-seed1000").rows().rows
        assert len(rows) == 4 if trial.state == "complete" else 2 <= len(rows) < 4
    assert method.options is not None and method.options["lr"] > 0.01


def test_metrics_of_lower_values_and_of_single_methods(tmp_path: Path) -> None:
    tuning = small(tmp_path / "loss", metric="loss", metrics={"fedprox": "clients_mean"}, trials=2)
    executed(tuning)
    found = tuned.read(tuning.folder)
    avg = found.of("fedavg")
    assert avg.better == "lower" and avg.best == min(trial.value for trial in avg.trials if trial.value is not None)
    assert (found.of("fedprox").metric, found.of("fedprox").better) == ("clients_mean", "higher")


def test_options_that_cannot_be_run_are_counted_and_the_others_go_on(tmp_path: Path) -> None:
    # it refuses lr >= 2 step
    ranges = {"fedsplit": {"step": {"low": 0.05, "high": 0.3}, "lr": {"low": 0.3, "high": 1.0}}}
    more: dict[str, Any] = {"algorithms": ["fedsplit"], "trials": 4, "sampler": "random", "ranges": ranges}
    tuning = small(tmp_path / "failing", "algorithm.lr=0.05", "rounds=1", **more)
    executed(tuning)
    method = tuned.read(tuning.folder).of("fedsplit")
    assert method.counted("failed") > 0 and method.counted("complete") > 0 and method.best is not None


def test_a_comparison_takes_the_best_options_on_fresh_seeds(whole: Tuning, tmp_path: Path) -> None:
    found = tuned.read(whole.folder)
    comparison = plan_comparison(whole.folder, folder=tmp_path / "compare", seeds=[0, 1])
    assert [method.label for method in comparison.methods] == ["fedavg", "fedprox"]
    for cell in comparison.cells:
        options = found.of(cell.method).options
        assert options is not None and all(cell.config.algorithm.options[key] == v for key, v in options.items())
        assert cell.config.evaluation.validation is None  # trained on all training rows, tested on test rows
    from rich.console import Console

    comparing.execute(comparison, jobs=1, console=Console(quiet=True))
    compare_pages.write(comparison)
    table = (comparison.folder / "table.md").read_text()
    assert "Tuning: 3 trials of each method (tpe, pruning: none)" in table and "options were tuned" in table
    assert "differs in more than the method" not in table
    stored = json.loads((comparison.folder / "results.json").read_text())["tuned"]
    assert [method["best"] for method in stored["methods"]] == [found.of(x).best for x in ("fedavg", "fedprox")]
    assert plan_comparison(whole.folder, algorithms=["fedprox"], seeds=[0]).methods[0].label == "fedprox"
    assert plan_comparison(whole.folder).seeds == (0, 1, 2, 3, 4)
    file = tmp_path / "file.toml"
    file.write_text(f'rounds = 7\n[compare]\ntuned = "{whole.folder}"\n')
    assert {cell.config.rounds for cell in plan_comparison(file).cells} == {7}
    with pytest.raises(Invalid, match="seed 1000 was used to tune"):
        plan_comparison(whole.folder, seeds=[0, 1000])
    with pytest.raises(Invalid, match=r"'fedavgm' was not tuned in this study \(did you mean 'fedavg'"):
        plan_comparison(whole.folder, algorithms=["fedavgm"])
    file.write_text(f'[compare]\ntuned = "{whole.folder}"\nmethods = ["fedavg"]\n')
    with pytest.raises(Invalid, match=r"compare.tuned and compare.methods are both given"):
        plan_comparison(file)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"algorithms": []}, "nothing to compare"),
        ({"algorithms": ["fedavgg"]}, "fedavgg"),
        ({"trials": 0}, "tune.trials = 0 is out of range"),
        ({"validation": 1.5}, "tune.validation = 1.5 is out of range"),
        ({"sampler": "best"}, "tune.sampler = 'best' is not one of tpe, random"),
        ({"pruner": "some"}, "tune.pruner = 'some' is not one of median, halving, none"),
        ({"seeds": [1, 1]}, "tune.seeds"),
        ({"trails": 3}, "tune.trails is not a setting .did you mean 'trials'"),
        ({"metrics": {"fedproxx": "loss"}}, "tune.metrics.fedproxx.*did you mean 'fedprox'"),
        ({"ranges": {"mv": {"low": 0.0, "high": 1.0}}}, "tune.ranges.mv is an option of none of the methods"),
        ({"ranges": {"lr": 3}}, "tune.ranges.lr = 3 must be a table"),
        ({"ranges": {"lr": {"low": 1.0, "hihg": 2.0}}}, "tune.ranges.lr.hihg is not a setting"),
        ({"ranges": {"lr": {"low": 2.0, "high": 1.0}}}, "tune.ranges.lr.*must be below high"),
        ({"ranges": {"krumm": {"lr": {"low": 1.0, "high": 2.0}}}}, "'krumm' is no method of this study"),
    ],
)
def test_bad_settings_are_refused_by_name_before_anything_runs(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(Invalid, match=words):
        small(tmp_path / "bad", **more)
    assert not (tmp_path / "bad").exists()


def test_what_the_data_show_is_refused_before_the_first_trial(whole: Tuning, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"tune.metric = 'acuracy' is not one of .*did you mean 'accuracy'"):
        executed(small(tmp_path / "metric", metric="acuracy"))
    with pytest.raises(Invalid, match=r"fedsiam_da: algorithm: .*siamese"):
        executed(small(tmp_path / "siamese", algorithms=["fedavg", "fedsiam_da"]))
    with pytest.raises(Invalid, match=r"evaluation.every = 0"):
        small(tmp_path / "never", "evaluation.every=0")
    with pytest.raises(Invalid, match=r"holds another study.*\n.*rounds: 3 -> 5"):
        executed(small(whole.folder, "rounds=5"))
    with pytest.raises(Invalid, match=r"fedavg: search.seed: 0 -> 7"):
        executed(small(whole.folder, seed=7))
    with pytest.raises(Invalid, match=r"holds no tuned.json"):
        tuned.read(tmp_path)
    shutil.copytree(whole.folder, tmp_path / "copy")
    (tmp_path / "copy" / tuned.NAME).write_text("{}")
    with pytest.raises(RecordError, match="damaged"):
        tuned.read(tmp_path / "copy")
    with RunLock(whole.folder / "lock"), pytest.raises(RunLocked):
        executed(small(whole.folder))


def test_the_command_and_python_give_the_same_study(whole: Tuning, tmp_path: Path) -> None:
    file = tmp_path / "file.toml"
    file.write_text("[tune]\ntrials = 3\npruner = 'none'\n")
    arguments = [str(file), *SMALL, "--algorithms", "fedavg", "--out", str(tmp_path / "command")]
    told = CliRunner().invoke(cli.app, ["tune", *arguments])
    assert told.exit_code == 0, told.output
    assert "fedavg, trial 3 of 3" in told.output and "best options" in told.output
    found = tune(file, *SMALL, algorithms=["fedavg"], folder=tmp_path / "python", progress=False)
    assert tried(tmp_path / "python") == tried(tmp_path / "command")
    assert repr(found).startswith("TuningResult(3 trials each: fedavg 0.") and len(repr(found)) <= 100
    assert repr(found.of("fedavg")).startswith("TunedMethod(fedavg: accuracy 0.")
    assert "best on validation rows" in found._repr_html_() and "lr = " in found._repr_html_()
    assert found.of("fedavg").trials == tuned.read(whole.folder).of("fedavg").trials
    page = (tmp_path / "command" / "tuned.html").read_text()
    assert (
        "Best accuracy over trials" in page and "best validation accuracy" in page and "trials of each method" in page
    )
    assert "| fedavg |" in (tmp_path / "command" / "tuned.md").read_text()
    refused = CliRunner().invoke(cli.app, ["tune", str(file), "--algorithms", "nope"])
    assert refused.exit_code == 2


def test_importing_the_package_does_not_import_optuna() -> None:
    code = "import sys, consilience, consilience.cli, consilience.tuning.tune; sys.exit('optuna' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
