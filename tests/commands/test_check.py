"""`consilience check`: sizes and bytes are those of the run, warnings name clients, nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from consilience.cli import app
from consilience.experiments import runner
from consilience.experiments.config import config

SMALL = ("rounds=3", "model=logistic", "partition.clients=6", "algorithm.epochs=2", "engine.lane=serial", "threads=1")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "80"})


@pytest.mark.parametrize("more", [(), ("algorithm=scaffold",), ("algorithm=fedavg", "algorithm.channel=quantise")])
def test_sizes_and_bytes_are_those_of_the_run(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*SMALL, *more, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["ok"] and not list(tmp_path.iterdir())
    ran = runner.execute(config.load(None, [*SMALL, *more]), folder=tmp_path / "run")
    size, cost, row = found["size"], found["cost"], ran.history[0]
    assert (size["clients"], size["rows"], size["test_rows"], size["classes"]) == (6, 1438, 359, 10)
    assert size["parameters"] == ran.task.parameters == 650
    chosen = row["clients"] if "clients" in row else row["bytes_down"] / cost["bytes_down"]
    assert row["bytes_down"] == pytest.approx(cost["bytes_down"] * chosen)
    assert row["bytes_up"] == pytest.approx(cost["bytes_up"] * chosen)
    assert cost["run_seconds"] > 0 and cost["peak_bytes"] > 1e6


def test_a_table_in_the_place_of_a_config_is_answered_with_init(tmp_path: Path) -> None:
    table = tmp_path / "patients.csv"
    table.write_text("age,outcome\n40,ill\n")
    said = CliRunner().invoke(app, ["check", str(table)])
    assert said.exit_code == 2 and f"`consilience init {table}`" in said.output


def test_steps_of_a_round_are_counted_by_hand() -> None:
    settings = ("algorithm=fedavg", "partition=iid", "partition.clients=4", "algorithm.batch_size=100", "--no-measure")
    found = json.loads(call(*SMALL, *settings, "--json").stdout)
    # 1438 rows are 360, 360, 359, 359: four batches of at most 100 each, twice
    assert found["size"]["steps_a_round"] == 4 * 4 * 2 and found["size"]["clients_a_round"] == 4
    assert found["cost"] == {"not_measured": "--no-measure was given"} and found["warnings"] == []


def test_what_is_probably_not_meant_is_said() -> None:
    lone = (
        "partition=classes_per_client",
        "partition.classes_per_client=1",
        "partition.clients=10",
        "algorithm=fedavg",
    )
    settings = ("partition.clients=10", "algorithm.selection=0.1", "algorithm.batch_size=512")
    done = call(*SMALL[:2], *lone, *settings, "--no-measure")
    text = " ".join(done.stdout.split())
    assert done.exit_code == 0 and max(map(len, done.stdout.splitlines())) <= 80
    assert "leaves one of 10 clients in a round" in text
    assert "10 of 10 clients (0, 1, 2, 3, 4 and 5 more) have rows of one class alone" in text
    assert "fewer rows than algorithm.batch_size = 512" in text
    assert "nothing looks wrong" in call(*SMALL, "partition=iid", "algorithm=fedavg", "--no-measure").stdout


@pytest.mark.parametrize(
    ("setting", "word"), [("rounds=0", "rounds = 0"), ("data=mnist", "mnist"), ("algorithm.lr=-1", "algorithm.lr")]
)
def test_runs_that_cannot_start_exit_with_2(setting: str, word: str, tmp_path: Path) -> None:
    plain = call(setting, f"data_dir={tmp_path}")
    assert plain.exit_code == 2 and word in plain.stderr
    told = call(setting, f"data_dir={tmp_path}", "--json")
    assert told.exit_code == 2
    found = json.loads(told.stdout)
    assert found["ok"] is False and word in found["error"]
