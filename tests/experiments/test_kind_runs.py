"""Runs of every kind of task from configs: recipes, records, resuming, eval, class names and weights from tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from typer.testing import CliRunner

from consilience.cli import app
from consilience.core.settings import Invalid
from consilience.experiments import runner
from consilience.experiments.assembly import assemble, balanced, read_data
from consilience.experiments.config import config
from consilience.experiments.retest import retest
from consilience.runs.result import Result
from consilience.task.kinds import KINDS

pytestmark = pytest.mark.usefixtures("untraced")
ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("kind_*_quick.toml"))
MAIN = {"dense": "iou", "masked_tokens": "accuracy", "multi_label": "accuracy", "next_token": "perplexity"}
MAIN |= {"regression": "absolute_error", "several_outputs": "absolute_error", "token_labels": "accuracy"}
SERIAL = ("engine.lane=serial", "engine.device=cpu", "threads=1")


def run(tmp_path: Path, *overrides: str, recipe: Path | None = None) -> Result:
    return runner.execute(config.load(recipe, [*SERIAL, f"runs={tmp_path}", *overrides]))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_every_kind_has_a_recipe_that_learns(recipe: Path, tmp_path: Path) -> None:
    found = run(tmp_path, "rounds=4", recipe=recipe)
    main = MAIN[recipe.stem.removeprefix("kind_").removesuffix("_quick")]
    assert found.task.metrics.main == main and f"client_{main}_worst_tenth" in found.history[0]
    assert found.history[-1]["loss"] < found.history[0]["loss"]
    assert found.folder is not None
    manifest = json.loads((found.folder / "model.json").read_text())
    assert manifest["kind"] == found.task.kind.name
    text = CliRunner().invoke(app, ["show", str(found.folder)]).output
    assert found.task.metrics.main_row.title in text


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "kind_dense_quick.toml"
    whole = run(tmp_path, "rounds=2", "name=whole", recipe=recipe)
    half = run(tmp_path, "rounds=1", "name=half", recipe=recipe)
    assert half.folder is not None
    more = runner.proceed(half.folder, ["rounds=2"])
    assert more.history == whole.history
    assert all(torch.equal(a, b) for a, b in zip(more.model.state_dict().values(), whole.model.state_dict().values()))


def test_further_metrics_of_a_finished_run(tmp_path: Path) -> None:
    found = run(tmp_path, "rounds=1", "model.hidden=[4]", "partition.clients=3")
    assert found.folder is not None
    again = retest(found.folder, ['task.metrics=["per_class", "top_3", "auroc"]'])
    assert again.scores["accuracy"] == found.history[-1]["accuracy"]
    assert again.scores["recall_7"] is not None and again.scores["top_3"] >= again.scores["accuracy"]
    titles = {row.key: row.title for row in again.scores.metrics}
    assert titles["recall_7"] == "recall of 7" and again.scores["auroc_error"] < 0.1
    with pytest.raises(Invalid, match=r"task\.kind cannot be changed for a test"):
        retest(found.folder, ["task.kind=dense"])


def test_settings_of_the_task_are_written_only_where_they_differ() -> None:
    assert "task" not in config.load(None).table()
    given = config.load(None, ["task.kind=classification", "task.class_weights=balanced", "task.metrics=['top_5']"])
    assert given.table()["task"] == {"kind": "classification", "class_weights": "balanced", "metrics": ["top_5"]}
    assert config.from_table(given.table()) == given
    weights = config.load(None, ["task.class_weights=[1, 2.5]"])
    assert weights.task.class_weights == (1.0, 2.5) and config.from_table(weights.table()) == weights


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("task.kind=tokes",), r"task\.kind = 'tokes' is not one of|task\.kind"),
        (("task.class_weights=[1, -1]",), r"task\.class_weights"),
        (("task.label_smoothing=1.5",), r"task\.label_smoothing = 1\.5"),
        (
            ("data=diabetes", "partition=iid", "task.kind=classification"),
            "'classification' needs class numbers",
        ),
        (("task.kind=regression",), "task.kind = 'regression' does not fit 'digits', which has 10 classes"),
        (("task.kind=dense",), "are not .rows, height, width., as dense needs them"),
        (("task.ignore_index=3",), "ignore_index = 3 has no effect in classification"),
        (("task.class_weights=[1, 2]",), "class_weights has 2 numbers for 10 classes"),
        (
            ("data=diabetes", "partition=iid", "task.class_weights=balanced"),
            "'balanced' needs class numbers",
        ),
        (("data=diabetes",), "dirichlet splits by class, but the targets are float32"),
        (("data=shapes", "partition=natural"), "does not fit"),
        (("data=digits", "loss=cross_entropy", "task.kind=binary"), "task.kind = 'binary' is for 2 classes"),
        (("data=synthetic_text", "partition=natural", "model=char_lstm"), "gives outputs for|does not fit"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        assemble(config.load(None, [*SERIAL, *overrides]))


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    data = read_data(config.load(None))
    wanted = compute_class_weight("balanced", classes=np.arange(10), y=data.y.numpy())
    assert balanced(KINDS["classification"], data) == pytest.approx(wanted)
    shapes = read_data(config.load(None, ["data=shapes"]))
    wanted = compute_class_weight("balanced", classes=np.arange(4), y=shapes.y.numpy().reshape(-1))
    assert balanced(KINDS["dense"], shapes) == pytest.approx(wanted)


def write(folder: Path, name: str, rows: list[tuple[Any, ...]]) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    lines = ["size,pet,trust", *(",".join(map(str, row)) for row in rows)]
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Files of two clients, neither of which has all classes, with a column of weights."""
    rng = np.random.default_rng(0)
    sizes = {"cat": 1.0, "dog": 3.0, "hen": 5.0}
    for client, known in (("anna", ("cat", "hen")), ("bert", ("dog", "hen"))):
        rows = [(round(sizes[pet] + rng.normal(0, 0.3), 3), pet, 1 + k % 2) for k in range(20) for pet in known]
        write(tmp_path / "pets", client, rows)
    write(tmp_path / "other", "carl", [(3.1, "dog", 1), (2.9, "dog", 1), (5.2, "hen", 1), (4.9, "hen", 1)] * 4)
    write(tmp_path / "strange", "dora", [(3.1, "dog", 1), (5.2, "fox", 1)] * 8)
    return tmp_path


def test_names_of_classes_and_weights_from_clients_files(pets: Path) -> None:
    files = ("data.name=client_files", f"data.folder={pets / 'pets'}", "data.label=pet", "data.weight=trust")
    settings = (*files, "data.normalise=none", "partition=natural", "model=logistic", "rounds=8", "algorithm=fedavg")
    found = run(pets / "runs", *settings, "algorithm.lr=0.2", "algorithm.epochs=10")
    assert found.label_names == ("cat", "dog", "hen") and found.folder is not None
    assert found.predict(torch.tensor([[0.5], [6.0]])) == ["cat", "hen"]
    assert json.loads((found.folder / "model.json").read_text())["label_names"] == ["cat", "dog", "hen"]
    simulation = assemble(config.load(None, [*SERIAL, *settings]))
    assert simulation.federation.train.weight is not None
    assert set(simulation.federation.train.weight.tolist()) == {1.0, 2.0}
    other = [f"data.folder={pets / 'other'}", "data.test_fraction=0.5"]
    right = retest(found.folder, other)  # the classes of these files alone would be dog 0, hen 1
    output = found.task.apply(found.values, torch.tensor([[3.0], [5.0]]), train=False)[0].argmax(1).tolist()
    assert right.scores["accuracy"] == pytest.approx(np.mean([output[0] == 1, output[1] == 2]), abs=0.13)
    with pytest.raises(Invalid, match="has the class 'fox', which is not one of cat, dog, hen"):
        retest(found.folder, [f"data.folder={pets / 'strange'}"])


def test_the_order_of_classes_can_be_given(pets: Path) -> None:
    files = ("data.name=client_files", f"data.folder={pets / 'pets'}", "data.label=pet", "partition=natural")
    plain, ordered = (
        read_data(config.load(None, [*files, *more])) for more in ((), ["task.labels=['hen','cat','dog']"])
    )
    assert ordered.label_names == ("hen", "cat", "dog")
    assert torch.equal(ordered.y, torch.tensor([1, 2, 0])[plain.y])
