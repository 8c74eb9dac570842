"""From a file and arguments to cells: grids, what methods share, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from consilience import algorithms
from consilience.compare.command import numbers
from consilience.compare.fairness import planned_differences
from consilience.compare.plan import Comparison, plan
from consilience.core.settings import Invalid
from consilience.experiments.config.catalogue import KINDS
from consilience.runs import toml_text
from consilience.selection.everyone import Everyone, Pooled
from consilience.selection.poisson import Poisson
from consilience.selection.sliding_window import SlidingWindow
from consilience.selection.uniform import Uniform

ROOT = Path(__file__).parents[2]


def made(tmp_path: Path, spec: dict[str, Any], *overrides: str, **more: Any) -> Comparison:
    file = tmp_path / "file.toml"
    file.write_text(toml_text.dumps(more) + toml_text.dumps({"compare": spec}))
    return plan(file, overrides)


def labels(found: Comparison) -> list[str]:
    return [method.label for method in found.methods]


def test_lists_are_grids_and_every_point_is_a_method(tmp_path: Path) -> None:
    entry = {"algorithm": "fedprox", "options": {"mu": [0.01, 0.1], "lr": [0.1, 0.2], "epochs": 2}}
    found = made(tmp_path, {"methods": [entry], "seeds": [3, 5]})
    assert labels(found) == [f"fedprox mu={mu} lr={lr}" for mu in (0.01, 0.1) for lr in (0.1, 0.2)]
    assert [(cell.seed, cell.config.algorithm.options["mu"]) for cell in found.cells] == [
        (seed, mu) for seed in (3, 5) for mu in (0.01, 0.01, 0.1, 0.1)
    ]
    assert found.cells[0].name == "fedprox_mu_0.01_lr_0.1-seed3"
    assert {cell.config.algorithm.options["epochs"] for cell in found.cells} == {2.0}


def test_an_option_that_is_a_list_needs_a_list_of_lists_for_a_grid(tmp_path: Path) -> None:
    one = {"algorithm": "fedavg", "options": {"terms": [{"name": "proximal", "mu": 0.1}]}}
    assert labels(made(tmp_path, {"methods": [one]})) == ["fedavg"]
    two = {"algorithm": "fedavg", "options": {"terms": [[], [{"name": "proximal", "mu": 0.1}]]}}
    assert len(made(tmp_path, {"methods": [two]}).methods) == 2
    parts = {"algorithm": "fedavg", "options": {"selection": ["everyone", {"name": "uniform", "count": 3}]}}
    found = made(tmp_path, {"methods": [parts]})
    assert labels(found) == ["fedavg selection=everyone", "fedavg selection=uniform/3"]


def test_all_take_local_work_and_selection_from_the_base_and_nothing_else() -> None:
    names = [name for name in algorithms.names() if not name.startswith("duw")]
    needed = ["fedsplit.step=1.0", "fedprox_fedsplit.step=1.0", "feddf.public=noise_rows", "hetlora.ranks=[[4, 2]]"]
    base = ["algorithm=simprox", "algorithm.lr=0.07", "algorithm.epochs=4", "algorithm.tau=0.3", "rounds=7"]
    found = plan(None, base, algorithms=names, grids=needed, seeds=[0])
    own = {"centralised": Pooled(), "dp_fedavg": Poisson(rate=1.0)}  # part of what they are
    assert len(found.cells) == len(names)
    for cell in found.cells:
        options = cell.config.algorithm.options
        built = KINDS["algorithm"].build(cell.config.algorithm.name, options)
        if cell.method in ("fedaf", "feddm"):  # its clients do something else, with rates of their own
            continue
        assert (options["lr"], options["epochs"], cell.config.rounds) == (0.07, 4.0, 7), cell.method
        assert built.client.work.epochs == (5.0 if cell.method == "fedrep" else 4.0), cell.method  # 4 of them its head
        inner = getattr(built.selection, "inner", built.selection)
        assert inner == own.get(cell.method, SlidingWindow(fraction=0.3)), cell.method
        assert (options.get("tau") == 0.3) == (cell.method == "simprox"), cell.method


def test_what_a_base_selection_is_wins_over_the_recipes_own() -> None:
    found = plan(None, ["algorithm=fedavg"], algorithms=["fedavg", "simprox"], seeds=[0])
    for cell in found.cells:
        assert (
            KINDS["algorithm"].build(cell.config.algorithm.name, cell.config.algorithm.options).selection == Everyone()
        )
    assert planned_differences(found) == []


def test_what_differs_beyond_the_method_is_said(tmp_path: Path) -> None:
    methods = [
        {"algorithm": "fedavg"},
        {"algorithm": "simprox", "options": {"selection": {"name": "uniform", "count": 2}}},
        {"algorithm": "fedprox", "options": {"epochs": 9}, "settings": {"rounds": 3}},
        {"algorithm": "scaffold", "settings": {"model": {"name": "logistic"}}},
    ]
    notes = planned_differences(made(tmp_path, {"methods": methods}, "algorithm=fedavg"))
    assert f"simprox: selection: {Everyone()} -> {Uniform(count=2)}" in notes
    assert "fedprox: rounds: 20 -> 3" in notes and any(note.startswith("fedprox: epochs: 3") for note in notes)
    assert any(note.startswith("scaffold: model.name: 'mlp' -> 'logistic'") for note in notes)
    assert not any(note.startswith("fedavg") for note in notes)
    fewer = {"algorithm": "fedprox", "options": {"selection": {"name": "uniform", "count": 2}}}
    three = "algorithm.selection={name='uniform', count=3}"
    notes = planned_differences(
        made(tmp_path, {"methods": [{"algorithm": "fedavg"}, fewer]}, "algorithm=fedavg", three)
    )
    assert f"fedprox: selection: {Uniform(count=3)} -> {Uniform(count=2)}" in notes


def test_a_section_with_another_name_loses_the_old_ones_options(tmp_path: Path) -> None:
    entry = {"algorithm": "moon", "settings": {"model": {"name": "siamese", "backbone": "mlp"}}}
    found = made(tmp_path, {"methods": [entry]}, model={"name": "mlp", "hidden": [8]})
    assert found.cells[0].config.model.name == "siamese" and "hidden" not in found.cells[0].config.model.options
    entry = {"algorithm": "fedavg", "settings": {"model": {"hidden": [4]}}}
    found = made(tmp_path, {"methods": [entry]}, model={"name": "mlp", "hidden": [8]})
    assert found.cells[0].config.model.options["hidden"] == (4,)


def test_arguments_win_over_the_file(tmp_path: Path) -> None:
    spec = {"methods": [{"algorithm": "fedavg"}], "seeds": [0], "target": 0.5, "baseline": "fedavg"}
    made(tmp_path, spec)
    found = plan(tmp_path / "file.toml", algorithms=["fedprox"], seeds=[7, 8], baseline="fedprox", target=0.6)
    assert (labels(found), found.seeds, found.baseline, found.target) == (["fedprox"], (7, 8), "fedprox", 0.6)
    assert found.folder == Path("runs") / "compare-file"


def test_grids_on_the_command_line() -> None:
    found = plan(None, algorithms=["fedavg", "fedprox"], grids=["fedprox.mu=[0.1,0.2]", "all.lr=0.3"], seeds=[0])
    assert labels(found) == ["fedavg", "fedprox mu=0.1", "fedprox mu=0.2"]
    assert {cell.config.algorithm.options["lr"] for cell in found.cells} == {0.3}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "nothing to compare"),
        ({"methods": []}, "nothing to compare"),
        ({"methods": [{"label": "x"}]}, r"compare.methods\[0\].algorithm is missing"),
        ({"methods": [{"algorithm": "fedavgg"}]}, "did you mean 'fedavg'"),
        ({"methods": [{"algorithm": "fedavg", "optoins": {}}]}, "did you mean 'options'"),
        ({"methods": [{"algorithm": "fedprox", "options": {"nu": 1}}]}, r"compare.methods\[0\].options.nu is not"),
        ({"methods": [{"algorithm": "fedprox", "options": {"mu": [0.1, -1]}}]}, "fedprox mu=-1: algorithm.mu = -1"),
        ({"methods": [{"algorithm": "fedprox", "options": {"mu": []}}]}, "grid without values"),
        ({"methods": [{"algorithm": "fedavg"}, {"algorithm": "fedavg"}]}, "two methods have the label 'fedavg'"),
        ({"methods": [{"algorithm": "fedavg", "settings": {"seed": 1}}]}, "settings.seed cannot be set here"),
        ({"methods": [{"algorithm": "fedavg", "settings": {"runds": 1}}]}, "runds is not a setting"),
        ({"methods": [{"algorithm": "fedavg"}], "seeds": []}, "seeds"),
        ({"methods": [{"algorithm": "fedavg"}], "seeds": [1, 1]}, "twice"),
        ({"methods": [{"algorithm": "fedavg"}], "seeds": [-1]}, r"seeds\[0\] = -1 is out of range"),
        ({"methods": [{"algorithm": "fedavg"}], "baseline": "fedprox"}, "baseline = 'fedprox' is not one of fedavg"),
        ({"methods": [{"algorithm": "fedavg"}], "target": "nan"}, "target"),
        ({"methods": [{"algorithm": "fedavg"}], "metric": 3}, "compare.metric = 3 must be the key of a metric"),
        ({"method": []}, "did you mean 'methods'"),
    ],
)
def test_bad_comparisons_are_refused(tmp_path: Path, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        made(tmp_path, spec)


def test_bad_grids_are_refused() -> None:
    for text, message in (("mu=1", "METHOD.OPTION"), ("fedprx.mu=1", "did you mean 'fedprox'")):
        with pytest.raises(Invalid, match=message):
            plan(None, algorithms=["fedprox"], grids=[text])


def test_seeds_are_read() -> None:
    assert numbers("0,1, 2") == [0, 1, 2] and numbers("3-5,9") == [3, 4, 5, 9] and numbers("") == []
    for text in ("a", "1-", "5-3", "0-999999999"):
        with pytest.raises(Invalid, match="--seeds"):
            numbers(text)


def test_a_long_label_is_still_a_folder_name(tmp_path: Path) -> None:
    entries = [{"algorithm": "fedavg", "label": f"{'x' * 100} {n}"} for n in (1, 2)]
    names = [cell.name for cell in made(tmp_path, {"methods": entries, "seeds": [2**62]}).cells]
    assert len(set(names)) == 2 and all(len(name) <= 64 for name in names)


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").glob("compare_*.toml")), ids=lambda file: file.name)
def test_the_recipes_can_be_compared(file: Path) -> None:
    found = plan(file)
    assert len(found.methods) >= 2 and found.baseline in labels(found)
