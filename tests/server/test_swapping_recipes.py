"""The recipes on generated LEAF files, and a run that is stopped between averages and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from consilience import cli
from consilience.experiments.assembly import assemble
from consilience.experiments.config import config
from consilience.server.rules.swapping import Swapping

RECIPES = Path(__file__).parents[2] / "recipes"
pytestmark = pytest.mark.usefixtures("untraced")


def write_leaf(folder: Path, writers: int, rows: int) -> None:
    """A FEMNIST of LEAF's format: each writer's pictures, 784 numbers each, and labels below 62."""
    draw = np.random.default_rng(0)
    for part, count in (("train", rows), ("test", 2)):
        users = {
            f"f{k:04}_{k}": {
                "x": draw.random((count, 784)).round(2).tolist(),
                "y": draw.integers(62, size=count).tolist(),
            }
            for k in range(writers)
        }
        content = {"users": list(users), "num_samples": [count] * writers, "user_data": users}
        (folder / part).mkdir(parents=True)
        (folder / part / "all_data_0.json").write_text(json.dumps(content))


def run(*arguments: str) -> list[dict[str, object]]:
    found = CliRunner().invoke(cli.app, list(arguments))
    assert found.exit_code == 0, found.output
    folder = next(word.removeprefix("runs=") for word in arguments if word.startswith("runs="))
    (metrics,) = Path(folder).rglob("metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.parametrize("by", ["class", "writer"])
def test_femnist_recipes_run_on_leafs_files(by: str, tmp_path: Path) -> None:
    write_leaf(tmp_path / "femnist", writers=12, rows=6)
    small = ["rounds=3", "algorithm.batch_size=6", "engine.lane=serial", "model.channels=[2, 2]", "model.hidden=4"]
    clients = ["partition.clients=12", "partition.min_size=1"] if by == "class" else []
    recipe = str(RECIPES / f"simfedswap_femnist_{by}_quick.toml")
    rows = run("run", recipe, f"data_dir={tmp_path}", f"runs={tmp_path / 'runs'}", "--quiet", *small, *clients)
    assert len(rows) == 3 and rows[0]["cohort"] == rows[2]["cohort"] and len(rows[0]["cohort"]) == 10  # type: ignore


@pytest.mark.parametrize("file", sorted(RECIPES.glob("simfedswap_*.toml")), ids=lambda file: file.stem)
def test_recipes_swap_least_similar_models(file: Path) -> None:
    table = config.load(file).table()
    assert table["algorithm"]["name"] == "simfedswap" and table["algorithm"]["h2"] == 3
    assert table["rounds"] % 3 == 0, "a run should end with an average"


def test_a_run_stopped_between_averages_is_resumed_exactly(tmp_path: Path) -> None:
    recipe, small = str(RECIPES / "simfedswap_digits_quick.toml"), ["model.hidden=[4]", "engine.lane=serial", "--quiet"]
    chosen = "algorithm.selection={name='uniform', count=4}"
    whole = run("run", recipe, "rounds=5", f"runs={tmp_path / 'whole'}", chosen, *small)
    run("run", recipe, "rounds=2", f"runs={tmp_path / 'parts'}", chosen, *small)
    (folder,) = (tmp_path / "parts").iterdir()
    found = CliRunner().invoke(cli.app, ["resume", str(folder), "rounds=5", "--quiet"])
    assert found.exit_code == 0, found.output
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == whole
    server = assemble(config.load(Path(recipe), [chosen])).algorithm.server
    assert isinstance(server, Swapping) and server.room == 4
