"""Verdicts follow from stored rows by rule, the page has them, and cells are planned, stored and merged."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scipy import stats

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
cells = module("benchmarks/reproduction_cells.py")
pool = module("benchmarks/reproduction_pool.py")
CLAIMS = tomllib.loads((make.RESULTS / "claims.toml").read_text(encoding="utf-8"))["claim"]
EXPERIMENTS = cells.read_experiments()


def test_the_page_is_up_to_date() -> None:
    text = make.PAGE.read_text(encoding="utf-8")
    assert text == make.written(text), "out of date: run `make docs`"


def test_an_interval_is_that_of_a_paired_t_test() -> None:
    mine, theirs = [61.0, 63.5, 60.2, 64.0], [60.0, 61.0, 60.0, 61.5]
    found = make.interval([a - b for a, b in zip(mine, theirs)], 10)
    wanted = stats.ttest_rel(mine, theirs).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
    assert found.n == 4 and found.mean == pytest.approx(1.55)


def found(low: float, high: float, n: int = 5) -> Any:
    return make.Found(n=n, mean=(low + high) / 2, low=low, high=high)


@pytest.mark.parametrize(
    ("kind", "points", "low", "high", "wanted"),
    [
        ("higher", 0, 0.1, 2.0, "confirmed"),
        ("higher", 0, -0.1, 2.0, "open"),
        ("higher", 0, -2.0, -0.1, "contradicted"),
        ("higher", 2, 0.1, 2.1, "confirmed"),
        ("higher", 2, 0.1, 1.9, "contradicted"),  # better, but by less than claimed
        ("higher", 2, -0.5, 2.5, "open"),
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
    claim = {"kind": kind, "points": points}
    assert make.verdict(claim, found(low, high)) == wanted
    assert make.verdict(claim, found(low, high, n=2)) == "open"  # whatever it looks like
    assert make.verdict(claim, None) == "open"


def row(method: str, seed: int, values: dict[int, float], status: str = "finished", **more: Any) -> dict[str, Any]:
    tests = [{"round": number, "accuracy": value} for number, value in values.items()]
    known = {"digest": "d", "rounds": max(values), "planned": 20, "device": "cpu", "seconds": 10.0}
    return {"method": method, "seed": seed, "tests": tests, "status": status, **known, **more}


def test_pairs_are_by_seed_at_the_round_most_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "RESULTS", tmp_path)
    rows = [row("a", seed, {10: 0.5 + 0.01 * seed, 20: 0.6}) for seed in (0, 1)]
    rows += [row("a", 2, {10: 0.7}, "cut short"), row("a", 9, {10: 0.9, 20: 0.9})]  # nobody to pair 9 with
    rows += [row("b", seed, {10: 0.5, 20: 0.5}) for seed in (0, 1, 2)]
    rows += [row("a", 3, {10: 0.1}, "printed"), row("b", 3, {10: 0.1}, "printed")]  # replaced by measured rows
    (tmp_path / "e.json").write_text(json.dumps({"rows": rows}))
    claim = {"kind": "higher", "experiment": "e", "method": "a", "baseline": "b"}
    result = make.measured(claim)
    assert result.round == 10 and result.by_seed == pytest.approx((0.0, 1.0, 20.0))
    assert result.note == "10 of 20 rounds"
    assert make.measured({**claim, "measure": "last_four"}) is None  # nobody has four tests
    rows = [one for one in rows if one["method"] == "a" or one["status"] == "printed"]
    (tmp_path / "e.json").write_text(json.dumps({"rows": rows}))
    assert make.measured(claim).by_seed == (0.0,) and "as printed" in make.measured(claim).note  # of seed 3 alone


def test_a_printed_difference_can_be_read_from_both_sides() -> None:
    pair = {"method": "a", "baseline": "b", "differences": [1.0, 2.0, 6.0], "round": 5}
    stored = {"rows": [], "paired": [pair]}
    forward = make._by_print({"method": "a", "baseline": "b"}, stored)
    backward = make._by_print({"method": "b", "baseline": "a"}, stored)
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
            assert {claim["method"], claim.get("baseline", claim["method"])} <= methods, label
        elif "kind" in claim:
            assert (make.RESULTS / f"{claim['experiment']}.json").exists(), label


def test_stored_starts_are_those_of_the_methods_page() -> None:
    """The same number in two places is the same number."""
    page = (ROOT / "docs" / "methods" / "duw.md").read_text(encoding="utf-8").replace("*", "")
    for name in ("duw_environment_1", "duw_environment_2", "duw_environment_3", "duw_environment_4"):
        for stored in cells.stored([cells.RESULTS], name):
            line = " | ".join(f"{100 * test['accuracy']:.1f}" for test in stored["tests"])
            assert line in page, f"{name}: {stored['method']}, start {stored['seed']}"


def test_rows_are_merged_by_cell_and_a_longer_one_wins(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    cells.store(here, "e", [row("a", 0, {5: 0.1}, "cut short")])
    cells.store(there, "e", [row("a", 0, {5: 0.1, 20: 0.4}), row("b", 0, {20: 0.2})])
    merged = cells.stored([here, there], "e")
    assert [(one["method"], one["rounds"]) for one in merged] == [("a", 20), ("b", 20)]
    assert cells.stored([there, here], "e") == merged
    cells.store(here, "e", merged)
    assert cells.stored([here], "e") == merged


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
