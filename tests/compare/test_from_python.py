"""`cs.compare`, `cs.tune` and `cs.diagnose` give the numbers of the commands of these names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import consilience as cs
from consilience.cli import app
from consilience.core.settings import Invalid

SMALL = ("rounds=2", "model=logistic", "partition.clients=5", "algorithm.epochs=1", "engine.lane=serial", "threads=1")
pytestmark = pytest.mark.usefixtures("untraced")


def numbers(found: object) -> object:
    """Without what depends on the clock or the folder."""
    if isinstance(found, dict):
        return {key: numbers(value) for key, value in found.items() if "seconds" not in key and key != "folder"}
    return [numbers(item) for item in found] if isinstance(found, list) else found


@pytest.mark.slow
def test_compare_gives_the_commands_numbers(tmp_path: Path) -> None:
    words = ["--algorithms", "fedavg,fedprox", "--seeds", "0,1", "--out", str(tmp_path / "command"), "--quiet"]
    assert CliRunner().invoke(app, ["compare", *SMALL, *words]).exit_code == 0
    options = {"seeds": [0, 1], "folder": tmp_path / "python", "progress": False}
    found = cs.compare(["fedavg", {"algorithm": "fedprox"}], *SMALL, **options)  # type: ignore[operator]
    commands, ours = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("command", "python"))
    assert numbers(commands) == numbers(ours) and found.table().items() <= ours.items()
    mean = found.of("fedprox").qualities["accuracy"].mean
    assert [row["accuracy"] for row in found.rows()][1] == mean and "fedprox" in repr(found)
    with pytest.raises(Invalid, match="did you mean 'fedprox'"):
        found.of("fedproxx")
    with pytest.raises(Invalid, match="are given by name"):
        cs.compare([cs.fedavg()])  # type: ignore[operator]
    with pytest.raises(Invalid, match="must be a list of names"):
        cs.compare("fedavg")  # type: ignore[operator]


def test_tune_gives_the_commands_numbers(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    words = ["--algorithms", "fedavg", "--trials", "2", "--out", str(tmp_path / "command"), "--quiet"]
    assert CliRunner().invoke(app, ["tune", *SMALL, *words]).exit_code == 0
    found = cs.tune(None, *SMALL, algorithms=["fedavg"], trials=2, folder=tmp_path / "python", progress=False)
    again = cs.tune(*SMALL, algorithms=["fedavg"], trials=2, folder=tmp_path / "command", progress=False)
    assert found.of("fedavg").options == again.of("fedavg").options
    assert found.of("fedavg").best == again.of("fedavg").best


def test_diagnose_gives_the_commands_numbers_of_a_config_and_of_a_federation(tmp_path: Path) -> None:
    page = tmp_path / "d.html"
    assert CliRunner().invoke(app, ["diagnose", *SMALL, "--rounds", "2", "--out", str(page), "-q"]).exit_code == 0
    commands = json.loads(page.with_suffix(".json").read_text())
    assert cs.diagnose(*SMALL, rounds=2).table() == commands  # type: ignore[operator]
    partition = cs.partition("dirichlet", clients=5, alpha=0.5)
    federation, _ = cs.federate(cs.load_data("digits"), partition, seed=0)
    found = cs.diagnose(  # type: ignore[operator]
        federation,
        model=cs.build_model("logistic", (1, 8, 8), 10, seed=0),
        algorithm=cs.fedavg(lr=0.2, epochs=1, batch_size=16),
        rounds=2,
        title=commands["title"],
        lane="serial",
    )
    assert found.table() == commands
    assert found.save(tmp_path / "own" / "d.html").read_text() == page.read_text() and "<table" in found._repr_html_()
    with pytest.raises(Invalid, match="is a setting of a config"):
        cs.diagnose(federation, "rounds=3")  # type: ignore[operator]


def test_a_setting_as_an_argument_is_answered_with_how_it_is_written() -> None:
    with pytest.raises(TypeError, match=r"no argument 'rounds'.* such as 'rounds=3'"):
        cs.compare(["fedavg"], rounds=3)  # type: ignore[call-arg]
