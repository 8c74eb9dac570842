"""The examples run, quickly, and do what they say."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest

from consilience.experiments import config, runner

ROOT = Path(__file__).parents[1]


def test_own_model(capsys: pytest.CaptureFixture[str], untraced: None) -> None:
    names = runpy.run_path(str(ROOT / "examples" / "own_model.py"))
    result = names["result"]
    assert len(result.history) == 30 and result.history[-1]["accuracy"] > 0.8
    x, y = names["clients"][0]
    assert float((result.model(x).argmax(1) == y).double().mean()) > 0.7 and not result.model.training
    assert "accuracy" in capsys.readouterr().out


def test_own_algorithm(capsys: pytest.CaptureFixture[str], untraced: None) -> None:
    runpy.run_path(str(ROOT / "examples" / "own_algorithm.py"), run_name="__main__")
    accuracies = [float(text) for text in re.findall(r"accuracy (\d\.\d+)", capsys.readouterr().out)]
    assert len(accuracies) == 2 and accuracies[0] != accuracies[1] and min(accuracies) > 0.8


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
