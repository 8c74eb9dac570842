"""Which runs are one curve, what it is called, and its band, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sample_runs import written

from consilience.core.settings import Invalid
from consilience.reporting import tables
from consilience.reporting.figures.curves import against_costs
from consilience.reporting.groups import _cut, grouped
from consilience.reporting.runs import find
from consilience.runs.folder import RunFolder


def test_seeds_are_one_group_and_other_settings_are_not(tmp_path: Path) -> None:
    for seed in (1, 0):
        written(tmp_path, f"a{seed}", seed=seed)
    written(tmp_path, "b", algorithm="fedprox", more="mu = 0.1\n")
    written(tmp_path, "c", algorithm="fedprox", more="mu = 0.5\n")
    groups = grouped(find([tmp_path])[0])
    assert [group.label for group in groups] == ["fedavg", "fedprox mu=0.1", "fedprox mu=0.5"]
    assert [run.seed for run in groups[0].runs] == [0, 1]


def test_settings_that_an_older_run_lacks_do_not_clutter_the_labels(tmp_path: Path) -> None:
    written(tmp_path, "old")
    written(tmp_path, "new", algorithm="fedprox", more="mu = 0.1\n\n[limits]\nmin_valid = 1\nslack = 4096\n")
    assert [group.label for group in grouped(find([tmp_path])[0])] == ["fedprox", "fedavg"]


def test_labels_that_would_be_long_are_names_of_runs(tmp_path: Path) -> None:
    for number in (1, 2):
        more = f"epochs = {number}\n\n[environment]\nrows_per_second = {number}00\nspeed_spread = {number}.5\n"
        written(tmp_path, f"run{number}", more=more)
    assert [group.label for group in grouped(find([tmp_path])[0])] == ["fedavg (run1)", "fedavg (run2)"]


def test_a_setting_that_one_run_lacks_tells_if_nothing_else_does(tmp_path: Path) -> None:
    written(tmp_path, "a")
    written(tmp_path, "b", more="\n[limits]\nmax_norm = 2.0\n")
    labels = [group.label for group in grouped(find([tmp_path])[0])]
    assert labels == ["fedavg limits.max_norm=default", "fedavg limits.max_norm=2"]


def test_what_a_machine_decided_makes_no_group(tmp_path: Path) -> None:
    written(tmp_path, "a", more='\n[engine]\nlane = "serial"\n')
    written(tmp_path, "b", more='\n[engine]\nlane = "batched"\n', seed=1)
    assert len(grouped(find([tmp_path])[0])) == 1


def test_a_comparison_names_its_methods(tmp_path: Path) -> None:
    written(tmp_path, "x-seed0")
    written(tmp_path, "y-seed0", algorithm="fedprox")
    cells = {"x-seed0": {"method": "ours"}, "y-seed0": {"method": "theirs"}}
    (tmp_path / "plan.json").write_text(json.dumps({"cells": cells}))
    assert [group.label for group in grouped(find([tmp_path])[0])] == ["ours", "theirs"]


def test_a_band_is_over_the_rounds_that_all_seeds_have(tmp_path: Path) -> None:
    written(tmp_path, "a", accuracies=(0.1, 0.3, 0.8))
    written(tmp_path, "b", accuracies=(0.3, 0.5), seed=1)
    (group,) = grouped(find([tmp_path])[0])
    band = group.band("accuracy")
    assert band.rounds.tolist() == [1, 2]
    assert band.mean == pytest.approx([0.2, 0.4])
    assert band.low.tolist() == [0.1, 0.3] and band.high.tolist() == [0.3, 0.5]
    assert [len(rounds) for rounds, _ in band.curves] == [3, 2]
    assert group.first.name == "a"  # went furthest


def test_rounds_without_a_test_are_gaps(tmp_path: Path) -> None:
    written(tmp_path, "a", accuracies=(0.1, None, 0.8))
    (group,) = grouped(find([tmp_path])[0])
    assert group.band("accuracy").rounds.tolist() == [1, 3]


def test_the_table_has_mean_and_deviation(tmp_path: Path) -> None:
    written(tmp_path, "a", accuracies=(0.9, 0.5))
    written(tmp_path, "b", accuracies=(0.2, 0.7), seed=1)
    table = tables.final_numbers(grouped(find([tmp_path])[0]))
    line = dict(zip(table.head, table.lines[0]))
    assert line["runs"] == "2" and line["rounds"] == "2"
    assert line["accuracy"] == f"0.6000 ± {np.std([0.5, 0.7], ddof=1):.4f}"
    assert line["best"].startswith("0.8000")
    cost = tables.costs(grouped(find([tmp_path])[0]))
    assert dict(zip(cost.head, cost.lines[0]))["wall time"] == "5 s"
    assert dict(zip(cost.head, cost.lines[0]))["sent up"] == "2.0 MB"


def test_the_same_run_counts_once_and_nothing_is_no_report(tmp_path: Path) -> None:
    run = written(tmp_path / "runs", "a")
    assert len(find([run, tmp_path / "runs", run])[0]) == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(Invalid, match="holds no run"):
        find([tmp_path / "empty"])
    with pytest.raises(FileNotFoundError, match="is no folder"):
        find([tmp_path / "nowhere"])


def test_a_damaged_run_is_named_among_others_and_refused_alone(tmp_path: Path) -> None:
    written(tmp_path, "good")
    bad = written(tmp_path, "bad")
    (bad / "metrics.jsonl").write_text("no json\n")
    runs, problems = find([tmp_path])
    assert [run.name for run in runs] == ["good"] and "bad" in problems[0] and "line 1" in problems[0]
    with pytest.raises(RuntimeError, match="line 1"):
        find([bad])


def test_places_and_secrets_are_not_read_into_a_report(tmp_path: Path) -> None:
    run = written(tmp_path, "a")
    text = (run / "config.toml").read_text()
    text = 'data_dir = "/home/somebody"\nhub_token = "hf_123456"\n' + text
    RunFolder.open(run).store("config.toml", text.encode())
    config = find([run])[0][0].config
    assert "somebody" not in str(config) and "hf_123456" not in str(config)


def test_a_label_of_42_characters_is_kept_and_a_longer_one_is_cut_to_42() -> None:
    assert _cut("x" * 42) == "x" * 42
    assert _cut("x" * 43) == "x" * 41 + "…" and len(_cut("x" * 300)) == 42


def test_the_caption_says_that_every_seed_is_a_line(tmp_path: Path) -> None:
    written(tmp_path, "a")
    (alone,) = [f for f in against_costs(grouped(find([tmp_path])[0])) if f.name == "accuracy_against_traffic"]
    written(tmp_path, "b", seed=1)
    (both,) = [f for f in against_costs(grouped(find([tmp_path])[0])) if f.name == "accuracy_against_traffic"]
    assert "each line is one run (a seed)" in both.caption and "each line" not in alone.caption
