"""Verdicts follow from stored rows by rule, the page has them, and cells are planned, stored and merged."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy import stats

from consilience.experiments.config import config

ROOT = Path(__file__).parents[1]


def module(path: str) -> ModuleType:
    name = Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


make = module("docs/make_reproductions.py")
verdicts = module("docs/verdicts.py")
cells = module("benchmarks/reproduction_cells.py")
pool = module("benchmarks/reproduction_pool.py")
module("benchmarks/multi_process_service.py")
reproduce = module("benchmarks/reproduce.py")
starts = module("benchmarks/duw_starts.py")
variance = module("benchmarks/duw_variance.py")
CLAIMS = tomllib.loads((make.RESULTS / "claims.toml").read_text(encoding="utf-8"))["claim"]
EXPERIMENTS = cells.read_experiments()


def test_the_pages_are_up_to_date() -> None:
    for page, text in make.written().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name} is out of date: run `make docs`"


def test_an_interval_is_that_of_a_paired_t_test() -> None:
    mine, theirs = [61.0, 63.5, 60.2, 64.0], [60.0, 61.0, 60.0, 61.5]
    found = verdicts.interval([a - b for a, b in zip(mine, theirs)], 10)
    wanted = stats.ttest_rel(mine, theirs).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
    assert found.n == 4 and found.mean == pytest.approx(1.55)


def found(low: float, high: float, n: int = 5) -> Any:
    error = (high - low) / 2 / stats.t.ppf(0.975, n - 1)
    return verdicts.FileSettings(n=n, mean=(low + high) / 2, low=low, high=high, error=error)


@pytest.mark.parametrize(
    ("kind", "points", "low", "high", "wanted"),
    [
        ("higher", 0, 0.1, 2.0, "confirmed"),
        ("higher", 0, -0.1, 2.0, "open"),
        ("higher", 0, -2.0, -0.1, "contradicted"),
        ("higher", 2, 0.1, 2.1, "confirmed"),
        ("higher", 2, 0.1, 1.9, "contradicted"),  # better, but by less than claimed
        ("higher", 2, -0.5, 2.5, "open"),
        ("lower", 0, 0.1, 2.0, "confirmed"),  # differences are turned before
        ("equal", 1, -0.9, 0.9, "confirmed"),
        ("equal", 1, -0.9, 1.1, "open"),
        ("equal", 1, 1.1, 2.0, "contradicted"),
        ("at_least", 75, 75.5, 80.0, "confirmed"),
        ("at_least", 75, 70.0, 74.0, "contradicted"),
        ("at_most", 55, 50.0, 56.0, "open"),
        ("at_most", 55, 56.0, 60.0, "contradicted"),
    ],
)
def test_verdicts_by_rule(kind: str, points: float, low: float, high: float, wanted: str) -> None:
    """A verdict is given exactly where its test has p below 5 %."""
    claim = {"kind": kind, "points": points}
    word, p = verdicts.judged(claim, found(low, high))
    assert word == wanted
    assert (p < 0.05) == (wanted != "open")
    assert verdicts.judged(claim, found(low, high, n=3)) == ("open", None)  # whatever it looks like
    assert verdicts.judged(claim, None) == ("open", None)


def test_equivalence_is_two_one_sided_tests() -> None:
    values = [0.3, -0.2, 0.1, 0.4, -0.1, 0.2]
    _, p = verdicts.judged({"kind": "equal", "points": 0.5}, verdicts.interval(values, 1))
    upper = stats.ttest_1samp(values, 0.5, alternative="less").pvalue
    lower = stats.ttest_1samp(values, -0.5, alternative="greater").pvalue
    assert p == pytest.approx(2 * max(upper, lower))  # the interval is of 95 %, so each side has 2.5 %


def test_a_size_that_is_only_not_ruled_out_is_said() -> None:
    claim = {"kind": "higher", "points": 2}
    assert make._verdict(claim, found(0.1, 2.1), "confirmed", True) == (
        "**confirmed**; 2 points are not ruled out, nor shown"
    )
    assert make._verdict(claim, found(2.1, 4.1), "confirmed", False) == "**confirmed** †"
    assert (
        make._verdict({"kind": "higher", "stand_in": True}, found(0.1, 2.1), "confirmed", True) == "**confirmed** here"
    )
    assert make._verdict(claim, found(0.1, 1.9), "contradicted", True) == "**contradicted**"
    assert make._verdict({}, None, "open", True) == "open"


def test_holms_correction() -> None:
    """By hand: 0.01 x 4, then 0.015 x 3 pass; 0.03 x 2 does not, and so nothing after it."""
    assert verdicts.survives([0.03, 0.01, None, 0.04, 0.015]) == [False, True, True, False, True]


def test_arithmetic_is_checked() -> None:
    claim = {"kind": "arithmetic", "formula": "100 * (15 - 3) / 15", "claimed": 82, "tolerance": 0.5}
    assert verdicts.measured(claim).mean == 80 and verdicts.judged(claim, verdicts.measured(claim))[0] == "contradicted"
    claim["claimed"] = 80.4
    assert verdicts.judged(claim, verdicts.measured(claim))[0] == "confirmed"
    least = {"kind": "arithmetic", "formula": "min(2, 3) - 2.5", "claimed": 0, "relation": "at_least"}
    assert verdicts.judged(least, verdicts.measured(least))[0] == "contradicted"


def row(method: str, seed: int, values: dict[int, float], status: str = "finished", **more: Any) -> dict[str, Any]:
    tests = [{"round": number, "accuracy": value} for number, value in values.items()]
    known = {"digest": "d", "rounds": max(values), "planned": 20, "device": "cpu", "seconds": 10.0}
    return {"method": method, "seed": seed, "tests": tests, "status": status, **known, **more}


def test_pairs_are_by_seed_at_the_round_most_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "RESULTS", tmp_path)
    rows = [row("a", seed, {10: 0.5 + 0.01 * seed, 20: 0.6}) for seed in (0, 1)]
    rows += [row("a", 2, {10: 0.7}, "cut short"), row("a", 9, {10: 0.9, 20: 0.9})]  # nobody to pair 9 with
    rows += [row("b", seed, {10: 0.5, 20: 0.5}) for seed in (0, 1, 2)]
    rows += [row("a", 3, {10: 0.1}, "printed"), row("b", 3, {10: 0.1}, "printed")]  # replaced by measured rows
    (tmp_path / "e.json").write_text(json.dumps({"rows": rows}))
    claim = {"kind": "higher", "experiment": "e", "method": "a", "baseline": "b"}
    result = verdicts.measured(claim)
    assert result.round == 10 and result.by_seed == pytest.approx((0.0, 1.0, 20.0))
    assert result.note == "10 of 20 rounds"
    assert verdicts.measured({**claim, "measure": "last_four"}) is None  # nobody has four tests
    rows = [one for one in rows if one["method"] == "a" or one["status"] == "printed"]
    (tmp_path / "e.json").write_text(json.dumps({"rows": rows}))
    assert (
        verdicts.measured(claim).by_seed == (0.0,) and "as printed" in verdicts.measured(claim).note
    )  # of seed 3 alone


def test_the_best_baseline_counts_and_measures_are_taken_by_seed(tmp_path: Path) -> None:
    a = {1: 0.5, 2: 0.7, 3: 0.9, 4: 0.9, 5: 0.9}
    rows = [row("a", 0, a), row("b", 0, {n: v - 0.1 for n, v in a.items()}), row("c", 0, {**a, 2: 0.5, 5: 0.88})]
    for one in rows:
        for test, loss in zip(one["tests"], (5.0, 4.0, 3.0, 1.0, 0.0)):
            test["loss"] = loss if one["method"] == "a" else 2 * loss
    (tmp_path / "e.json").write_text(json.dumps({"rows": rows}))
    claim = {"kind": "higher", "experiment": "e", "method": "a", "baseline": ["b", "c"]}

    def value(**more: Any) -> float:
        return verdicts.measured({**claim, **more}, tmp_path).mean

    assert value() == pytest.approx(2.0)  # c is the better one after five rounds
    assert value(round=2) == pytest.approx(10.0)  # and b after two
    assert value(measure="every_round") == pytest.approx(0.0)  # c is level in rounds 1, 3 and 4
    assert value(measure="widest", baseline="c") == pytest.approx(20.0)  # after two rounds
    assert value(kind="at_most", measure="widest", method="b", baseline="c") == pytest.approx(10.0)  # either way
    assert value(measure="last_four", baseline="b") == pytest.approx(10.0)
    assert value(kind="lower", measure="rounds_to", target=70, baseline="c") == 1  # round 2 against round 3
    assert value(kind="lower", measure="roughness", baseline="b") == pytest.approx(0.5)  # changes -1, -1, -2, -1
    assert value(measure="mean_of_rounds", baseline="b") == pytest.approx(10.0)
    assert value(round=2, baseline_round=5) == pytest.approx(-18.0)  # 70 % after two rounds, c's 88 % after five
    for test, loss in zip(rows[1]["tests"], (5.0, 6.0, 3.0, 3.5, 2.0)):
        test["loss"] = loss
    (tmp_path / "e.json").write_text(json.dumps({"rows": rows}))
    assert value(kind="lower", measure="rises", baseline="b") == pytest.approx(1.5)  # b's loss rises twice, a's never


def test_measures_of_one_method(tmp_path: Path) -> None:
    learned = [[0.2, 0.8], [0.5, 0.5], [0.8, 0.2], [0.1, 0.9], [0.45, 0.55]]
    one = row("a", 0, dict.fromkeys(range(1, 6), 0.5), learned=learned)
    one["tests"][-1]["f1"] = 0.47
    (tmp_path / "e.json").write_text(json.dumps({"rows": [one]}))
    claim = {"kind": "at_most", "experiment": "e", "method": "a"}
    for measure, expected in (("spread_first", 0.0), ("spread_last", 10.0), ("f1_gap", -3.0)):
        assert verdicts.measured({**claim, "measure": measure}, tmp_path).mean == pytest.approx(expected), measure
    del one["learned"]
    (tmp_path / "e.json").write_text(json.dumps({"rows": [one]}))
    assert verdicts.measured({**claim, "measure": "spread_last"}, tmp_path) is None


def test_personal_models_are_compared_on_the_clients_own_rows(tmp_path: Path) -> None:
    one, other = row("a", 0, {1: 0.8}), row("b", 0, {1: 0.1})
    one["tests"][0]["client_accuracy_mean"] = 0.75
    other["tests"][0] |= {"client_accuracy_mean": 0.1, "personal_accuracy_mean": 0.7}
    (tmp_path / "e.json").write_text(json.dumps({"rows": [one, other]}))
    claim = {"kind": "higher", "experiment": "e", "method": "a", "baseline": "b", "measure": "own_rows"}
    assert verdicts.measured(claim, tmp_path).mean == pytest.approx(5.0)


def test_variances_of_weights_over_several_numbers_of_rounds(tmp_path: Path) -> None:
    tests = [{"round": rounds, "variance": 0.5 * rounds**-1.5} for rounds in (2, 8, 32)]
    one = {"method": "a", "seed": 0, "status": "finished", "rounds": 32, "planned": 32, "tests": tests, "digest": ""}
    (tmp_path / "e.json").write_text(json.dumps({"rows": [one]}))
    claim = {"kind": "at_most", "experiment": "e", "method": "a"}
    share = verdicts.measured({**claim, "measure": "variance_share"}, tmp_path)
    slope = verdicts.measured({**claim, "measure": "variance_slope"}, tmp_path)
    assert share.mean == pytest.approx(0.25)  # of 1/sqrt(2), with two rounds
    assert slope.mean == pytest.approx(-1.5)
    learned = [{"seed": 3, "rounds": rounds, "variance": 0.1 / rounds, "iterations": 40} for rounds in (2, 5)]
    made = variance.row_of(learned)
    assert made["tests"] == [{"round": 2, "variance": 0.05}, {"round": 5, "variance": 0.02}]
    assert (made["seed"], made["rounds"], made["iterations"], made["status"]) == (3, 5, 40, "finished")


def test_planned_seeds_are_enough_for_a_verdict() -> None:
    named = {one.name: one for one in EXPERIMENTS}
    for claim in CLAIMS:
        if "kind" in claim and claim.get("experiment") in named:
            planned = len(named[claim["experiment"]].seeds)
            assert planned >= verdicts.ENOUGH, f"{claim['experiment']}: {claim['claim']}"


def test_there_is_no_verdict_before_all_planned_seeds_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "PLANNED", {"e": 6})
    claim = {"kind": "higher", "experiment": "e"}
    few, all_in = (verdicts.interval([1.0, 1.1, 0.9, 1.0, 1.05, 0.95][:n], 1) for n in (5, 6))
    assert verdicts.judged(claim, few)[0] == "open" and verdicts.judged(claim, all_in)[0] == "confirmed"
    assert verdicts.judged({**claim, "experiment": "of no plan"}, few)[0] == "confirmed"


def test_there_is_no_verdict_on_runs_that_were_cut_short(tmp_path: Path) -> None:
    rows = [row("a", seed, {10: 0.6 + seed / 1000}, "cut short") for seed in range(4)]
    (tmp_path / "e.json").write_text(json.dumps({"rows": rows}))
    claim = {"kind": "at_least", "experiment": "e", "method": "a", "points": 50}
    cut = verdicts.measured(claim, tmp_path)
    assert cut.n == 4 and cut.note == "10 of 20 rounds" and verdicts.judged(claim, cut) == ("open", None)
    rows = [row("a", seed, {10: 0.6, 20: 0.6 + seed / 1000}) for seed in range(4)]
    (tmp_path / "e.json").write_text(json.dumps({"rows": rows}))
    assert verdicts.judged(claim, verdicts.measured(claim, tmp_path))[0] == "confirmed"


def test_an_experiment_may_take_some_methods_of_its_recipe() -> None:
    every = next(one for one in EXPERIMENTS if one.name == "simprox_lambda")
    label = "simprox lambda_0=0.6"
    few = cells.cells_of(dataclasses.replace(every, methods=(label,)), [])
    assert {cell.method for cell in few} == {label} and len(few) == len(every.seeds)
    whole = {(cell.method, cell.digest) for cell in cells.cells_of(every, [])}
    assert {(cell.method, cell.digest) for cell in few} < whole


def test_a_printed_difference_can_be_read_from_both_sides() -> None:
    pair = {"method": "a", "baseline": "b", "differences": [1.0, 2.0, 6.0], "round": 5}
    stored = {"rows": [], "paired": [pair]}
    forward = verdicts.by_print({"method": "a", "baseline": "b"}, stored)
    backward = verdicts.by_print({"method": "b", "baseline": "a"}, stored)
    assert forward.mean == 3.0 and (backward.low, backward.high) == pytest.approx((-forward.high, -forward.low))


def test_every_claim_names_what_exists() -> None:
    named = {one.name: one for one in EXPERIMENTS}
    for claim in CLAIMS:
        label = f"{claim['paper']}: {claim['claim']}"
        for path in re.findall(r"(?:recipes|examples)/[\w.]+\.(?:toml|py)", claim.get("command", "")):
            assert (ROOT / path).exists(), f"{label}: {path}"
        assert "kind" in claim or claim["why"], f"{label}: a claim without a test needs a reason"
        if claim.get("experiment") in named:
            methods = {cell.method for cell in cells.cells_of(named[claim["experiment"]], [])}
            assert {claim["method"], *verdicts.baselines(claim)} <= methods, label
        elif claim.get("kind", "arithmetic") != "arithmetic":
            assert (make.RESULTS / f"{claim['experiment']}.json").exists(), label


def test_emphasised_clients_by_hand() -> None:
    """Ten rounds of five clients; what the paper says about the learned weights, as one number."""
    first = [[0.1, 0.1, 0.1, 0.1, 0.6]] * 9 + [[0.2] * 5]
    assert starts.emphasis(1, first) == pytest.approx(0.5)  # client 4, and the last round does not count
    labels = [[0.2] * 5] * 5 + [[0.35, 0.35, 0.1, 0.1, 0.1]] * 5
    assert starts.emphasis(2, labels) == pytest.approx(0.25)  # clients 0 and 1, second half
    assert starts.emphasis(3, [[0.6, 0.1, 0.1, 0.1, 0.1]] * 10) == pytest.approx(0.5)
    assert starts.emphasis(4, [[0.05, 0.1, 0.2, 0.3, 0.35]] * 5 + [[0.9, 0.1, 0, 0, 0]] * 5) == pytest.approx(1.0)
    found = {"environment": 3, "start": 7, "algorithm": "duw_fedavg", "accuracy": [0.5, 0.75], "seconds": 3}
    found |= {"iterations": 2, "weights": [[0.6, 0.1, 0.1, 0.1, 0.1]] * 2}
    made = starts.row_of(found, "cpu")
    assert (made["method"], made["seed"], made["final"], made["status"]) == ("duw_fedavg", 7, 0.75, "finished")
    assert made["tests"][-1] == {"round": 2, "accuracy": 0.75, "emphasis": pytest.approx(0.5)} and made["seconds"] == 3
    assert "seconds" not in starts.row_of({**found, "seconds": None}, "cpu")  # learned in two parts


def test_stored_emphasis_follows_from_the_stored_weights() -> None:
    seen = 0
    for path in sorted(make.RESULTS.glob("duw_environment_*.json")):
        for one in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if "learned" in one:
                wanted = starts.emphasis(int(path.stem.split("_")[2]), one["learned"])
                assert one["tests"][-1]["emphasis"] == pytest.approx(wanted, abs=1e-9), (path.stem, one["seed"])
                seen += 1
    assert seen >= 25


def test_tables_of_the_method_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with digits replace printed ones, which are marked; weights of favoured clients are added up."""
    monkeypatch.setattr(make, "RESULTS", tmp_path)
    rows = [row("fedavg", 0, {10: 0.8, 20: 0.9}), row("fedavg", 1, {10: 0.7}), row("fedavg", 2, {10: 0.1}, "printed")]
    cells.store(tmp_path, "e_002", [{**one, "digest": str(number)} for number, one in enumerate(rows)])
    cells.store(tmp_path, "e_01", [row("fedavg", 0, {10: 0.5}, "printed"), row("moon", 0, {5: 0.5})])
    lines = make.level_table("e", 10).splitlines()
    assert lines[0] == "| | 0.02 | 0.1 |"
    assert lines[2:] == ["| fedavg | 75.0 ± 7.1 (2 seeds) | 50.0 (as printed) |", "| moon | – | – |"]
    learned = [[0.1, 0.2, 0.1, 0.4, 0.2], [0.1, 0.1, 0.1, 0.5, 0.2], [0.2] * 5]
    cells.store(tmp_path, "duw_environment_4", [row("duw_fedavg", 3, {1: 0.5}, learned=learned)])
    (line,) = make.favoured_table().splitlines()[2:]
    assert line.endswith("| 60 to 70 % | 40 % | 3 |")
    cells.store(tmp_path, "duw_environment_1", [row("fedavg", 0, {1: 0.5}, "printed"), row("dr_fedavg", 0, {1: 0.5})])
    table = make.start_table("1")
    assert "| 0 | FedAvg, as printed | **50.0** |" in table and "| 0 | DR-FedAvg | **50.0** |" in table


def test_rows_are_merged_by_cell_and_a_longer_one_wins(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    cells.store(here, "e", [row("a", 0, {5: 0.1}, "cut short")])
    cells.store(there, "e", [row("a", 0, {5: 0.1, 20: 0.4}), row("b", 0, {20: 0.2})])
    merged = cells.stored([here, there], "e")
    assert [(one["method"], one["rounds"]) for one in merged] == [("a", 20), ("b", 20)]
    assert cells.stored([there, here], "e") == merged
    cells.store(here, "e", merged)
    assert cells.stored([here], "e") == merged


def test_a_repeat_is_compared_in_what_both_have_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A repeat brings a measure that was not stored before; everything else must be the same to the bit."""
    here, there = tmp_path / "here", tmp_path / "there"
    old, other = row("a", 0, {5: 0.1, 20: 0.4}, weights="w"), row("b", 0, {20: 0.2})
    new = row("a", 0, {5: 0.1, 20: 0.4}, weights="w", seconds=3.0)
    new["tests"][-1]["precision"] = 0.3
    cells.store(here, "e", [old, other])
    cells.store(there, "e", [new])
    assert reproduce.merge(there, here) == 0
    said = "1 rows are replaced by a repeat, 1 of them by the same version of PyTorch, 1 of these with the same bits"
    assert said in capsys.readouterr().out
    assert cells.stored([here], "e") == [new, other]
    assert not reproduce.same_bits(old, {**new, "weights": "v"})
    assert not reproduce.same_bits(old, row("a", 0, {5: 0.1, 20: 0.41}, weights="w"))
    assert reproduce.merge(there, here) == 0 and "repeat" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no rows are there"):
        reproduce.merge(tmp_path / "nowhere", here)


def test_a_run_from_before_a_measure_that_a_claim_reads_is_missing() -> None:
    every = next(one for one in EXPERIMENTS if one.name == "simprox_banking77_ngrams")
    planned = [cell for cell in cells.cells_of(every, []) if cell.seed == 0]
    values = {"accuracy": 0.5, "f1": 0.5}
    done = [row(cell.method, 0, {50: 0.5}, digest=cell.digest) for cell in planned]
    for one in done:
        one["tests"][-1] |= values
    assert {cell.method for cell in cells.missing(planned, done)} == {"simprox", "fedavg"}  # a claim reads precision
    for one in done:
        one["tests"][-1]["precision"] = 0.5
    assert cells.missing(planned, done) == []


def test_cheap_blocks_come_first_and_no_experiment_gets_all_its_seeds_before_others_have_one() -> None:
    known = {}
    for experiment in EXPERIMENTS:
        if experiment.name in ("simprox_lambda", "fedsplit_pi_loss"):
            known[experiment.name] = cells.cells_of(experiment, []), []
    order = cells.ordered(known)
    seeds = [(cell.experiment.name, cell.seed) for cell in order]
    first = {name: min(i for i, one in enumerate(seeds) if one == (name, 0)) for name in known}
    last = max(i for i, one in enumerate(seeds) if one == ("simprox_lambda", 9))
    assert first["simprox_lambda"] == 0 < first["fedsplit_pi_loss"] < last
    assert len(order) == sum(len(planned) for planned, _ in known.values())
    done = [row(cell.method, cell.seed, {20: 0.5}, digest=cell.digest) for cell in order if cell.seed == 0]
    mine = [one for one in done if one["method"].startswith("simprox")]
    rest = cells.missing(known["simprox_lambda"][0], mine)
    assert {cell.seed for cell in rest} == set(range(1, 10))
    assert (
        cells.missing(known["simprox_lambda"][0], [{**one, "digest": ""} for one in mine]) == known["simprox_lambda"][0]
    )


def test_what_cannot_be_finished_waits_until_nothing_else_is_left(tmp_path: Path) -> None:
    slow, fast = (
        next(one for one in EXPERIMENTS if one.name == name) for name in ("fedsplit_pi_loss", "simprox_lambda")
    )
    waiting = [cells.cells_of(slow, [])[0], cells.cells_of(fast, [])[0]]
    folders = {cell.key: tmp_path / cell.run.name for cell in waiting}
    pace = pool.Pace()
    assert pool.next_cell(waiting, "cpu", 70.0, folders, pace) is waiting[1]
    assert pool.next_cell(waiting[:1], "cpu", 70.0, folders, pace) is waiting[0]
    assert pool.next_cell(waiting, "cpu", 600.0, folders, pace) is waiting[0]
    assert pool.next_cell(waiting, "cuda", 600.0, folders, pace) is None


def test_a_process_runs_its_cell_and_says_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    small = ["rounds=3", "model=logistic", "partition.clients=3", "engine.lane=serial", "seed=5"]
    waiting, sent = [(str(tmp_path / "cell"), "fedavg", config.load(None, small).toml())], []

    class Pipe:
        """The end of a connection whose other end sends one cell and is closed."""

        def recv(self) -> tuple[str, str, str]:
            if not waiting:
                raise EOFError
            return waiting.pop()

        def send(self, message: tuple[Any, ...]) -> None:
            sent.append(message)

    threads = torch.get_num_threads()
    try:
        pool.work_on(Pipe(), "cpu")
    finally:
        torch.set_num_threads(threads)
    (first, took), (last, text, facts) = sent
    assert (first, last) == ("round", "end") and took > 0 and "accuracy" in text
    assert facts["device"] == "cpu" and facts["torch"] == torch.__version__
    experiment = next(one for one in EXPERIMENTS if one.device == "cpu")
    stored = cells.row_of(cells.cells_of(experiment, [])[0], tmp_path / "cell", facts)
    assert stored["status"] == "finished" and [test["round"] for test in stored["tests"]] == [1, 2, 3]
    assert {"accuracy", "f1", "precision", "recall"} <= stored["tests"][-1].keys()


def test_what_is_left_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run is finished, one is cut short, one is never begun."""
    experiment = next(one for one in EXPERIMENTS if one.device == "cpu")
    todo = cells.cells_of(experiment, [])[:3]
    ends = [(todo[0], "accuracy 0.9", {"end": "finished"}), (todo[1], "stopped", {"end": "cut short"})]

    class Served:
        def serve(self, *_: Any) -> list[Any]:
            return ends

    monkeypatch.setattr(reproduce.Pool, "opened", lambda *_: contextlib.nullcontext(Served()))
    monkeypatch.setattr(
        reproduce, "row_of", lambda cell, _, facts: row(cell.method, cell.seed, {5: 0.9}, facts["end"]) | {"digest": ""}
    )
    given = {"minutes": 1.0, "work": tmp_path / "work", "again": 0, "results": tmp_path, "gpu_jobs": 1, "jobs": 1}
    known = {experiment.name: (todo, [])}
    assert reproduce.run(todo, known, argparse.Namespace(**given)) == 0
    assert "2 of 3 runs are left" in capsys.readouterr().out
    del ends[1]
    assert reproduce.run(todo[:1], known, argparse.Namespace(**given)) == 0
    assert "left" not in capsys.readouterr().out
    assert [one["status"] for one in cells.stored([tmp_path], experiment.name)] == ["finished", "cut short"]
