"""The command line: what it prints, what it refuses, and how it exits."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from consilience.cli import app
from consilience.reporting import terminal
from consilience.runs import checkpoint
from consilience.runs.text import duration, took

pytestmark = pytest.mark.usefixtures("untraced")

ROOT = Path(__file__).parents[2]
SMALL = ("rounds=3", "model=logistic", "partition.clients=6", "algorithm.epochs=1", "engine.lane=serial", "threads=1")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    assert call("run", *SMALL, "--folder", str(folder), "--quiet").exit_code == 0
    return folder


def test_help_does_not_wait_for_pytorch() -> None:
    code = "import sys\nfrom consilience.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass\n"
    done = python(code + "assert not {'torch', 'sklearn', 'numpy'} & set(sys.modules), 'imported'")
    assert done.returncode == 0, done.stderr
    for command in ("run", "resume", "list", "show", "eval"):
        assert command in done.stdout


@pytest.mark.parametrize("module", ["consilience", "consilience.cli"])
def test_python_m_is_the_command(module: str) -> None:
    command = [sys.executable, "-m", module, "show-algorithm", "simproxy"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode != 0 and "did you mean 'simprox'" in done.stderr


def test_help_is_whole_and_an_unknown_command_is_answered_once() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output.split())
    assert "Train, and write a run folder that can be resumed, shown and repeated." in shown and shown.count("...") == 1
    for arguments, name in ((["ls"], "'list'"), (["deploy", "upp"], "'up'")):
        said = call(*arguments).output
        assert said.count("Did you mean") == 1 and name in said


def test_the_package_alone_imports_nothing_heavy_and_offers_its_names() -> None:
    done = python("import sys, consilience as cs\nassert 'torch' not in sys.modules\nprint(dir(cs))")
    assert done.returncode == 0 and all(name in done.stdout for name in ("simprox", "train", "Federation"))
    code = "import consilience as cs\nfor name in cs.__all__: assert getattr(cs, name) is not None\ncs.simprox(lr=0.05)"
    assert python(code).returncode == 0
    assert "no attribute 'simproxy'" in python("import consilience as cs\ncs.simproxy").stderr


def test_run_shows_rounds_results_and_what_to_do_next(tmp_path: Path) -> None:
    done = call("run", *SMALL, f"runs={tmp_path}", "--name", "mine")
    assert done.exit_code == 0, done.output
    lines = re.findall(r"round \d/3  accuracy \d\.\d{4}  loss \d\.\d{4}  [\d,.]+ clients/s  left \d:\d\d", done.output)
    assert len(lines) == 3
    folder = tmp_path / "mine"
    assert f"consilience resume {folder}" in done.output and f"consilience show {folder}" in done.output
    assert "worst tenth" in done.output and "macro F1" in done.output


def test_a_file_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('rounds = 9\n[model]\nname = "logistic"\n[partition]\nclients = 4\nalpha = 1.0\n')
    done = call("run", str(tmp_path / "c.toml"), "rounds=1", "engine.lane=serial", f"runs={tmp_path}", "-q")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(tmp_path / "simprox-digits")
    stored = (tmp_path / "simprox-digits" / "config.toml").read_text()
    assert "rounds = 1" in stored and "clients = 4" in stored


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "algorithm.lerning_rate=3"), ("algorithm.lerning_rate",)),
        (("run", "algorithm.lr=-1"), ("algorithm.lr = -1.0", "> 0")),
        (("run", "rounds=0"), ("rounds = 0", ">= 1")),
        (("run", "absent.toml"), ("absent.toml",)),
        (("run", "one.toml", "two.toml"), ("two.toml", "key=value")),
        (("run", "--name", "../up"), ("name = '../up'",)),
        (("run", "data=mnist", "data_dir=/nowhere"), ("mnist", "/nowhere", "data_dir")),
        (("resume", "/nowhere/at/all"), ("/nowhere/at/all", "holds no run")),
        (("show", "/nowhere"), ("holds no run",)),
        (("eval", "/nowhere"), ("holds no run",)),
        (("list", "simprx"), ("did you mean 'simprox'",)),
        (("compare", "compare.seeds=0,1"), ("compare.seeds", "--seeds")),
        (("compare", "compare.methods=fedavg"), ("compare.methods", "--algorithms")),
        (("tune", "tune.trials=3"), ("tune.trials", "--trials")),
        (("tune", "tune.ranges=3"), ("tune.ranges", "[tune]")),
    ],
)
def test_bad_requests_get_one_message_and_code_2(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and "Traceback" not in done.output
    assert all(word in done.stderr for word in words), done.stderr


def test_debug_shows_the_traceback() -> None:
    done = call("run", "rounds=0", "--debug")
    assert done.exit_code == 1 and type(done.exception).__name__ == "Invalid"


def test_messages_cannot_forge_lines() -> None:
    done = call("run", "name=\x1b[2Jgone\u202e")
    assert done.exit_code == 2 and "\x1b" not in done.stderr and "\u202e" not in done.stderr


def test_divergence_has_its_own_exit_code(tmp_path: Path) -> None:
    done = call("run", *SMALL, "rounds=9", "algorithm.lr=1e38", "algorithm=fedavg", f"runs={tmp_path}", "-q")
    assert done.exit_code == 3 and "last good checkpoint is intact" in done.stderr


def test_resume_adds_rounds_and_says_where_it_goes_on(run: Path) -> None:
    done = call("resume", str(run), "rounds=4")
    assert done.exit_code == 0, done.output
    assert "continuing after round 3" in done.output and "round 4/4" in done.output
    again = call("resume", str(run))
    assert again.exit_code == 0 and "round 4/4" not in again.output


def test_resume_refuses_a_change_unless_forced(run: Path) -> None:
    refused = call("resume", str(run), "rounds=5", "algorithm.lr=0.1")
    assert refused.exit_code == 2 and "algorithm.lr: 0.2 -> 0.1" in refused.stderr and "--force" in refused.stderr


def test_damaged_checkpoints_have_their_own_exit_code(run: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for generation in checkpoint.generations(copy / "checkpoints"):
        (generation / "manifest.json").write_text("{}")
    done = call("resume", str(copy), "rounds=9")
    assert done.exit_code == 4 and "manifest.json" in done.stderr


def test_show_a_run_and_all_runs(run: Path) -> None:
    one = call("show", str(run), "--rows", "2", "--config")
    assert one.exit_code == 0 and "simprox on digits, 6 clients (dirichlet), logistic" in one.stdout
    assert "alpha = 0.5" in one.stdout and "finished" in one.stdout and "\u2588" in one.stdout
    several = call("show", "--runs", str(run.parent))
    assert several.exit_code == 0 and str(run) in several.stdout
    assert call("show", "--runs", str(run / "nothing")).exit_code == 0


@pytest.mark.parametrize("width", [60, 80])
def test_show_cuts_no_number_in_a_narrow_terminal(run: Path, width: int) -> None:
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    done = CliRunner().invoke(app, ["show", str(run)], env={"COLUMNS": str(width)})
    assert done.exit_code == 0 and "…" not in done.stdout
    shown = done.stdout[done.stdout.index("round") :]
    for key in (
        "loss",
        "accuracy",
        "client_accuracy_mean",
        "client_accuracy_worst_tenth",
        "train_loss",
        "drift_relative",
    ):
        assert f"{last[key]:.4f}" in shown, key
    assert max(map(len, shown.splitlines())) <= width


def test_eval_gives_the_recorded_numbers(run: Path) -> None:
    done = call("eval", str(run))
    assert done.exit_code == 0, done.output
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for key in ("loss", "accuracy", "precision", "recall", "f1"):
        assert re.search(rf"(?i){key} +{last[key]:.4f}", done.stdout), key
    assert len(re.findall(r"^\d+ +\d+ +\d\.\d{4} +\d", done.stdout, re.MULTILINE)) >= 4  # clients with test rows


def test_eval_on_other_data_and_what_it_refuses(run: Path) -> None:
    other = call("eval", str(run), "data.seed=5", "partition.clients=3")
    assert other.exit_code == 0, other.output
    unfit = call("eval", str(run), "--data", "breast_cancer")
    assert unfit.exit_code == 2 and "has the class 'malignant', which is not one of 0, 1" in unfit.stderr
    assert call("eval", str(run), "algorithm.lr=1").exit_code == 2


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.4, "1:01"), (3725, "1:02:05")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (0.4249, "0.42 s"), (9.6, "9.6 s"), (9.96, "0:10"), (61, "1:01")]
)
def test_a_short_run_took_seconds(seconds: float, text: str) -> None:
    assert took(seconds) == text


def test_sparklines() -> None:
    assert terminal.sparkline([0, 1, None, 0.5]) == "▁█ ▅"
    assert terminal.sparkline([1, 1]) == "▁▁" and terminal.sparkline([None]) == ""
    assert len(terminal.sparkline(list(range(1000)))) == 60


def test_names_in_tables_are_escaped() -> None:
    import numpy as np
    from rich.console import Console

    from consilience.core.metrics import MetricRow
    from consilience.task.scores import ClientScores, Scores

    row, one = MetricRow(key="good", title="[blue]good"), np.array([0.5])
    found = Scores(
        rows=1,
        metrics=(row,),
        values={"good": 1.0},
        client_rows=np.array([1]),
        clients=ClientScores(main=row, loss=one, values=one),
    )
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal.scores(found, ["[red]\x1bevil"]))
    text = console.export_text()
    assert "[red]\\x1bevil" in text and "[blue]good" in text
