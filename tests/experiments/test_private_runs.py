"""Private runs as users start them: what is spent and never given back, what is refused, what a crash leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from typer.testing import CliRunner

from consilience.cli import app
from consilience.core import tree
from consilience.core.settings import Invalid
from consilience.experiments import record, runner
from consilience.experiments.config import config
from consilience.privacy import Spending
from consilience.runs.folder import RunFolder
from consilience.runs.result import Result

pytestmark = pytest.mark.usefixtures("untraced")
dp_accounting = pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")
PRIVATE = ("algorithm=dp_fedavg", "algorithm.noise=2.0", "algorithm.rate=0.5", "partition.clients=8", "rounds=4")
SMALL = ("model=logistic", "engine.lane=serial", "threads=1", "checkpoint.every=2")
SEEDED = "algorithm.noise_seed=3"


def start(runs: Path, *overrides: str) -> Result:
    return runner.execute(config.load(None, [*PRIVATE, *SMALL, f"runs={runs}", "name=private", *overrides]))


def spent(folder: Path) -> dict[str, Any]:
    return RunFolder.open(folder).facts()["privacy"]


def test_every_round_says_what_has_been_spent(tmp_path: Path) -> None:
    done = start(tmp_path)
    wanted = [Spending(noise=2.0, rate=0.5).epsilon(rounds) for rounds in (1, 2, 3, 4)]
    assert [row["epsilon"] for row in done.history] == wanted
    facts = spent(tmp_path / "private")
    assert (facts["rounds"], facts["delta"], facts["noise"], facts["rate"]) == (4, 1e-5, 2.0, 0.5)
    assert facts["epsilon"] == wanted[-1] and facts["releases"] == 4


def test_too_many_rounds_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        Invalid, match=r"rounds = 4 would cost epsilon = .* rounds fit, or algorithm.noise = "
    ) as caught:
        start(tmp_path, "algorithm.epsilon=1.0")
    assert not any(tmp_path.iterdir())
    noise = float(str(caught.value).split("algorithm.noise = ")[1].split()[0])
    assert start(tmp_path, "algorithm.epsilon=1.0", f"algorithm.noise={noise * 1.001}").history[-1]["epsilon"] <= 1.0


def test_without_the_accountant_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(Invalid, match=r"pip install 'consilience\[dp\]'"):
        start(tmp_path, "algorithm.noise=2.71")  # of which nobody has asked before
    assert not any(tmp_path.iterdir())


def test_batch_norm_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="without batch norm"):
        start(tmp_path, "model=resnet18", "model.width=4", "model.stem=cifar")
    assert not any(tmp_path.iterdir())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of all models that were looked at."""
    digests: list[str] = []
    evaluate = record.evaluate

    def look(task: Any, model: Any, *rest: Any, **options: Any) -> Any:
        flat = b"".join(leaf.numpy().tobytes() for leaf in tree.leaves(model))
        digests.append(hashlib.sha256(flat).hexdigest())
        if len(digests) == STOP["after"]:
            raise KeyboardInterrupt
        return evaluate(task, model, *rest, **options)

    monkeypatch.setattr(record, "evaluate", look)
    monkeypatch.setitem(STOP, "after", 0)
    return digests


STOP = {"after": 0}  # so many models were looked at; 0: never


@pytest.mark.parametrize("broken", [1, 2, 3, 4])
def test_a_round_done_again_after_a_crash_is_the_same_release(
    broken: int, seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has just been looked at when the process dies: by then it is in the ledger, and its key is on disk."""
    monkeypatch.setitem(STOP, "after", broken)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    folder = tmp_path / "private"
    known = spent(folder)
    assert known["rounds"] == broken and len(RunFolder.open(folder).rows().rows) == broken - 1
    saved = (broken - 1) // 2 * 2  # rounds in a checkpoint: their keys are gone
    assert sorted(os.listdir(folder / "keys")) == [f"round-{n:08d}" for n in range(saved + 1, broken + 1)]
    again = runner.proceed(folder)
    assert seen[broken : 2 * broken - saved] == seen[saved:broken], "another model of the same round"
    assert spent(folder)["releases"] == 4 and len(set(seen)) == 4
    wanted = [Spending(noise=2.0, rate=0.5).epsilon(rounds) for rounds in (1, 2, 3, 4)]
    assert [row["epsilon"] for row in again.history] == wanted and known["epsilon"] == wanted[broken - 1]


def test_a_seeded_run_repeats_itself_and_says_that_it_is_not_private(tmp_path: Path) -> None:
    one, other = start(tmp_path / "one", SEEDED), start(tmp_path / "other", SEEDED)
    assert one.history == other.history and tiny.same(one.values, other.values)
    assert all(row["private"] is False for row in one.history) and not spent(tmp_path / "one" / "private")["private"]
    private = start(tmp_path / "private")
    assert private.history != start(tmp_path / "second").history, "two runs of one seed share their noise"
    assert all(row["private"] for row in private.history) and spent(tmp_path / "private" / "private")["private"]


def test_wherever_epsilon_is_shown_a_seeded_run_is_called_not_private(tmp_path: Path) -> None:
    for name, options in (("seeded", [SEEDED]), ("secret", [])):
        folder = tmp_path / "runs" / name
        commands = [
            ["run", *PRIVATE, *SMALL, "rounds=1", *options, "--folder", str(folder)],
            ["show", str(folder)],
            ["show", "--runs", str(folder.parent)],
            ["report", str(folder), "--out", str(tmp_path / "page.html")],
        ]
        told = [" ".join(CliRunner().invoke(app, command).output.split()) for command in commands]
        told[-1] = (tmp_path / "page.html").read_text()
        assert ["not private" in text for text in told] == [name == "seeded"] * 4
        shutil.rmtree(folder)


def test_noise_once_seeded_is_never_private_again(tmp_path: Path) -> None:
    start(tmp_path, SEEDED, "rounds=2")
    rows = runner.proceed(tmp_path / "private", ["algorithm.noise_seed=none", "rounds=3"], force=True).history
    assert [row["private"] for row in rows] == [False] * 3 and not spent(tmp_path / "private")["private"]


def test_resuming_for_more_rounds_asks_the_budget_again(tmp_path: Path) -> None:
    budget = Spending(noise=2.0, rate=0.5).epsilon(5)
    start(tmp_path, f"algorithm.epsilon={budget}")
    folder = tmp_path / "private"
    assert len(runner.proceed(folder, ["rounds=5"]).history) == 5
    with pytest.raises(Invalid, match="5 rounds fit"):
        runner.proceed(folder, ["rounds=6"])
    assert spent(folder)["rounds"] == 5


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (["data=breast_cancer"], r"data\.name = 'breast_cancer'"),
        (["data=table", "data.file=rows.csv", "data.client=hospital", "data.label=y"], r"data\.standardise = True"),
        (["data=text_table", "data.train=texts.csv", "data.text=t", "data.label=y"], r"data\.features = 'words'"),
    ],
)
def test_rows_prepared_with_those_of_all_clients_are_refused(data: list[str], named: str, tmp_path: Path) -> None:
    """One client's rows would change the others'."""
    lines = [f"{n % 4},{n},{n % 3},{n % 2}" for n in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["hospital,a,b,y", *lines]))
    (tmp_path / "texts.csv").write_text("\n".join(["t,y", *(f"some words {n % 5},{n % 2}" for n in range(40))]))
    model = "model=logistic" if "text_table" not in data[0] else "model=char_lstm"
    with pytest.raises(Invalid, match=f"a private run cannot have {named}"):
        start(tmp_path / "runs", *data, model, f"data_dir={tmp_path}")


def test_the_record_is_plain_json(tmp_path: Path) -> None:
    start(tmp_path, "rounds=1")
    assert json.loads((tmp_path / "private" / "run.json").read_text())["privacy"]["neighbours"].startswith("one client")
