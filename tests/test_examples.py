"""The examples run, quickly, and do what they say."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import consilience as cs
from consilience.experiments import runner
from consilience.experiments.config import config

ROOT = Path(__file__).parents[1]


def test_own_model(capsys: pytest.CaptureFixture[str], untraced: None) -> None:
    names = runpy.run_path(str(ROOT / "examples" / "own_model.py"))
    result = names["result"]
    assert len(result.history) == 30 and result.history[-1]["accuracy"] > 0.8
    x, y = names["clients"][0]
    assert float((result.model(x).argmax(1) == y).double().mean()) > 0.7 and not result.model.training
    assert "accuracy" in capsys.readouterr().out


def run_script(path: str, *arguments: str, folder: Path) -> str:
    """What an example prints, run as a reader would."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / path), *arguments]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return found.stdout


def real_data(name: str) -> str:
    data_dir = os.environ.get("CONSILIENCE_DATA", "")
    if not (data_dir and (Path(data_dir) / name).is_dir()):
        pytest.skip(f"$CONSILIENCE_DATA has no folder {name}: the example's data are looked for there")
    return data_dir


def test_own_algorithm_beside_fedavg(tmp_path: Path) -> None:
    printed = run_script("own_algorithm/compare.py", "--seeds", "1", "--rounds", "4", folder=tmp_path)
    found = {name: float(re.search(rf"^{name} +(\d+\.\d)", printed, re.M)[1]) for name in ("FedAvg", "hard first")}
    assert found["FedAvg"] != found["hard first"] and min(found.values()) > 50


def test_own_weights_by_hand() -> None:
    """Weights ~ N_k loss^power."""
    names = runpy.run_path(str(ROOT / "examples" / "own_algorithm" / "hard_first.py"))
    cohort = types.SimpleNamespace(
        reply={"loss": torch.tensor([4.0, 1.0])}, examples=torch.tensor([10.0, 60.0], dtype=torch.float64)
    )
    weights, _, _ = names["LossWeights"](power=0.5).weigh(cohort, {}, {})
    assert weights.tolist() == pytest.approx([20 / 80, 60 / 80])
    with pytest.raises(cs.Invalid, match="power"):
        names["hard_first"](power=-1.0)


def test_own_algorithm_by_name(tmp_path: Path) -> None:
    """Copied into the package, the file is an algorithm of the command line."""
    shutil.copytree(ROOT / "consilience", tmp_path / "consilience")  # with its compiled files, which saves seconds
    shutil.copy(ROOT / "examples" / "own_algorithm" / "hard_first.py", tmp_path / "consilience" / "algorithms")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    arguments = [
        "algorithm=hard_first",
        "algorithm.power=1",
        "rounds=1",
        "model=logistic",
        "engine.lane=serial",
        "--quiet",
    ]
    command = [sys.executable, "-c", "from consilience.cli import main; main()", "run", *arguments]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert "LossWeights(power=1.0)" in (tmp_path / found.stdout.strip() / "run.json").read_text()


def test_four_hospitals(tmp_path: Path) -> None:
    data = real_data("heart_disease")
    printed = run_script(
        "four_hospitals/compare.py", "--data-dir", data, "--seeds", "1", "--rounds", "5", folder=tmp_path
    )
    lines = printed.splitlines()
    assert lines[0].split()[-5:] == ["cleveland", "hungarian", "switzerland", "va", "mean"]
    means = {line[:28].strip(): float(line.split()[-2]) for line in lines[1:]}
    assert len(means) == 6 and all(mean > 65 for mean in means.values())
    assert means["each alone"] > means["most common diagnosis"]  # a model is worth more than none


@pytest.mark.slow
def test_people_with_phones(tmp_path: Path) -> None:
    data = real_data("uci_har_acc")
    printed = run_script(
        "people_with_phones/compare.py", "--data-dir", data, "--seeds", "1", "--rounds", "3", folder=tmp_path
    )
    everyone = {line[:28].strip(): float(line.split()[-4]) for line in printed.splitlines()[1:]}
    assert list(everyone) == ["each alone", "FedAvg", "FedBN", "FedPer", "Ditto"]
    assert all(accuracy > 40 for accuracy in everyone.values())  # of six activities
    assert everyone["FedBN"] > everyone["FedAvg"]


def test_condensed_pictures_are_nearer_to_rows_where_they_start_from_them() -> None:
    names = runpy.run_path(str(ROOT / "examples" / "condensed_pictures" / "nearest.py"))
    cell = names["Cell"](
        condensed=torch.tensor([[0.0, 0.1], [3.0, 4.0]]),
        training=torch.tensor([[0.0, 0.0], [1.0, 0.0]]),
        held_out=torch.tensor([[1.0, 1.0], [1.0, 2.0], [-3.0, 0.0]]),
        size=1,
    )
    own, other = cell.distances()
    assert own.tolist() == pytest.approx([0.1, 20**0.5]) and other.tolist() == pytest.approx([1, 2, 3])
    assert names["copies"]([cell]) == 50  # 1.02 is the 1 % quantile of 1, 2, 3


@pytest.mark.slow
def test_condensed_pictures(tmp_path: Path) -> None:
    printed = run_script("condensed_pictures/nearest.py", "--seeds", "1", "--rounds", "1", folder=tmp_path)
    copied = {line[:14].strip(): float(line.split()[-1]) for line in printed.splitlines()[1:]}
    assert copied["fedaf, rows"] > 90 and copied["fedaf, noise"] == 0
    assert copied["fedaf, noise"] < copied["fedaf, means"] < copied["fedaf, rows"]


def test_text_and_pictures(tmp_path: Path) -> None:
    """Files are written and read; clinics 1 and 3 have no pictures and still train."""
    pytest.importorskip("PIL")
    printed = run_script("text_and_pictures/generate.py", "--folder", str(tmp_path), folder=tmp_path)
    assert printed.startswith("400 rows in ")
    overrides = [f"data_dir={tmp_path}", f"runs={tmp_path / 'runs'}", "rounds=10", "engine.lane=serial"]
    settings = config.load(ROOT / "examples" / "text_and_pictures" / "early_fusion.toml", overrides)
    with runner.start(settings) as run:
        rows = run.experiment.engine.store("train")
        seen = list(run.observations())
    assert [int(rows.of(k)[0]["present"][:, 0].sum()) for k in range(4)] == [80, 0, 80, 0]
    assert seen[-1].row["cohort"] == [0, 1, 2, 3] and seen[-1].row["accuracy"] > 0.5  # of three kinds


def test_the_quickstart_recipe_learns_digits(tmp_path: Path) -> None:
    settings = config.load(ROOT / "recipes" / "quickstart.toml", [f"runs={tmp_path}", "engine.lane=serial"])
    found = runner.execute(settings)
    assert len(found.history) == 20 and found.history[-1]["accuracy"] > 0.9
    assert found.folder == tmp_path / "quickstart"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist_simprox", "mnist_fedavg"])
def test_the_mnist_recipes_reach_95_percent(tmp_path: Path, name: str) -> None:
    data_dir = os.environ.get("CONSILIENCE_DATA")
    if not data_dir:
        pytest.skip("CONSILIENCE_DATA is not set: MNIST is looked for there")
    settings = config.load(ROOT / "recipes" / f"{name}.toml", [f"runs={tmp_path}", "evaluation.every=2"])
    assert settings.rounds == 30
    with runner.start(settings) as run:
        accuracies = (seen.row["accuracy"] or 0 for seen in run.observations())
        assert any(accuracy >= 0.95 for accuracy in accuracies)  # stops at the first one
