"""Verdicts on the papers' claims, by rule, from the rows in docs/results; make_reproductions.py writes the page."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scipy import stats

RESULTS = Path(__file__).with_name("results")
LEVEL, POWER = 0.05, 0.8
ENOUGH = 4  # seeds; with fewer nothing is confirmed or contradicted
PLANNED = {  # seeds of each experiment: no verdict before all are in, so that none depends on when runs stopped
    one["name"]: len(one["seeds"])
    for one in tomllib.loads((RESULTS / "experiments.toml").read_text(encoding="utf-8"))["experiment"]
}
LAST_TESTS = 4
CONFIRMED, CONTRADICTED, OPEN = "confirmed", "contradicted", "open"

Table = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    """What the stored rows say: a mean (of differences, or of levels), and how sure it is; or a computed number."""

    n: int
    mean: float
    low: float | None = None
    high: float | None = None
    error: float | None = None  # standard error of the mean
    round: int = 0
    by_seed: tuple[float, ...] = ()
    note: str = ""
    whole: bool = True  # False: runs were cut short before the claim's round

    @property
    def seen(self) -> float | None:
        """The difference that so many seeds with this spread show with a probability of 80 %."""
        if self.error is None:
            return None
        return self.error * float(stats.t.ppf(1 - LEVEL / 2, self.n - 1) + stats.t.ppf(POWER, self.n - 1))

    def p(self, value: float) -> float:
        """Of the two-sided t test against `value`."""
        if self.error is None:
            return 1.0
        if self.error == 0:
            return float(self.mean == value)
        return float(2 * stats.t.sf(abs(self.mean - value) / self.error, self.n - 1))


def interval(values: Sequence[float], round: int, note: str = "") -> FileSettings:
    """Mean and 95 % interval by Student's t."""
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return FileSettings(n=n, mean=mean, round=round, by_seed=tuple(values), note=note)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * error
    low, high = mean - half, mean + half
    return FileSettings(n=n, mean=mean, low=low, high=high, error=error, round=round, by_seed=tuple(values), note=note)


def judged(claim: Table, found: FileSettings | None) -> tuple[str, float | None]:
    """The verdict, and the p of the test that it rests on (None: no test).

    higher, lower: confirmed if all of the interval is above 0 and some of it reaches the claimed points; contradicted
    if all of it is below 0 or below the claimed points. equal: all of it within the margin, which is two one-sided
    tests, or all of it outside. at_least, at_most: all of it on the claimed side, or on the other. arithmetic: the
    computed number is the claimed one.
    """
    if found is None:
        return OPEN, None
    kind, points = claim["kind"], float(claim.get("points", 0.0))
    if kind == "arithmetic":
        apart = claim["claimed"] - found.mean
        right = apart <= 0 if claim.get("relation") == "at_least" else abs(apart) <= claim.get("tolerance", 0.0)
        return (CONFIRMED if right else CONTRADICTED), None
    if found.n < max(ENOUGH, PLANNED.get(claim.get("experiment", ""), 0)) or not found.whole:
        return OPEN, None
    if found.low is None or found.high is None:
        return OPEN, None
    low, high = found.low, found.high
    if kind in ("higher", "lower"):
        right, wrong = low > 0 and high >= points, high < 0 or high < points
        p = found.p(points if wrong and high >= 0 else 0.0)
    elif kind == "equal":
        right, wrong = -points <= low and high <= points, low > points or high < -points
        p = (min if wrong else max)(found.p(points), found.p(-points))
    elif kind in ("at_least", "at_most"):
        right, wrong = low >= points, high < points
        right, wrong = (right, wrong) if kind == "at_least" else (high <= points, low > points)
        p = found.p(points)
    else:
        raise SystemExit(f"claims.toml: kind = {kind!r} is not known; see the head of the file")
    return (CONFIRMED if right else CONTRADICTED if wrong else OPEN), p


def survives(ps: Sequence[float | None]) -> list[bool]:
    """Which of the tests are significant after Holm's correction for all of them; True where there is no test."""
    tested = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    kept = [p is None for p in ps]
    for rank, (p, place) in enumerate(tested):
        if p * (len(tested) - rank) > LEVEL:
            break
        kept[place] = True
    return kept


def measured(claim: Table, results: Path | None = None) -> FileSettings | None:
    """What is stored for a claim, or computed; None if nothing is."""
    if claim.get("kind") == "arithmetic":
        names = {"min": min, "max": max, "mean": statistics.fmean, "sqrt": math.sqrt}
        return FileSettings(n=0, mean=float(eval(claim["formula"], {"__builtins__": {}}, names)))
    path = (results or RESULTS) / f"{claim.get('experiment')}.json"
    if "kind" not in claim or not path.exists():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    by_rows = _by_rows(claim, stored["rows"])
    printed = by_print(claim, stored)
    return by_rows if by_rows is not None and (printed is None or by_rows.n >= printed.n) else printed


def baselines(claim: Table) -> list[str]:
    """What the method is compared with: one, several (the best of them counts), or none."""
    given = claim.get("baseline", [])
    return [given] if isinstance(given, str) else list(given)


def _by_rows(claim: Table, rows: Sequence[Table]) -> FileSettings | None:
    """Pairs, or single runs: at the claim's round, or at the latest of those that most seeds have reached."""
    names = [claim["method"], *baselines(claim)]
    for printed in (False, True):  # measured rows replace printed ones, and the two are never paired
        found = [_of(rows, name, printed) for name in names]
        if all(found):
            break
    else:
        return None
    mine, theirs = found[0], found[1:]
    seeds = [seed for seed in mine if all(seed in one for one in theirs)]
    values: dict[int, list[float]] = {}
    for seed in seeds:
        for number, value in _differences(claim, mine[seed], [one[seed] for one in theirs]).items():
            values.setdefault(number, []).append(value)
    wanted = [number for number in values if number == claim.get("round", number)]
    if not wanted:
        return None
    chosen = max(wanted, key=lambda number: (len(values[number]), number))
    used = [mine[seed] for seed in seeds]
    planned = claim.get("round") or max(row["planned"] for row in used)
    notes = ["as printed"] if any(row["status"] == "printed" for row in used) else []
    whole = chosen >= planned or claim.get("measure") == "rounds_to"
    notes += [] if whole else [f"{chosen} of {planned} rounds"]
    return replace(interval(values[chosen], chosen, "; ".join(notes)), whole=whole)


def _differences(claim: Table, mine: Table, theirs: Sequence[Table]) -> dict[int, float]:
    """By round: the method's value, or how much better it is than the best baseline."""
    measure = claim.get("measure", "accuracy")
    if measure == "rounds_to":
        needed = [_rounds_to(row, claim["target"] / 100) for row in (mine, *theirs)]
        return {} if None in needed else {0: min(needed[1:]) - needed[0]}
    scale = 1.0 if measure in ("roughness", "rises", "variance_share", "variance_slope") else 100.0
    key = "accuracy" if measure in ("every_round", "widest") else measure
    better = min if claim["kind"] == "lower" else max
    found = {}
    for number in (test["round"] for test in mine["tests"]):
        at = claim.get("baseline_round", number)
        own, others = _value(mine, number, key), [_value(row, at, key) for row in theirs]
        if own is None or None in others:
            continue
        found[number] = scale * (own - better(others) if others else own)
    found = {number: -value for number, value in found.items()} if claim["kind"] == "lower" else found
    if measure == "every_round" and found:  # the round in which it leads least
        return {max(found): min(found.values())}
    if measure == "widest" and found:
        return {max(found): max(map(abs, found.values()))}
    return found


def _of(rows: Sequence[Table], method: str, printed: bool) -> dict[Any, Table]:
    """A method's rows by seed; of several settings that it was run with, those of most rows."""
    found = [
        row for row in rows if row["method"] == method and row["tests"] and printed == (row["status"] == "printed")
    ]
    digests = [row.get("digest", "") for row in found]
    return {row["seed"]: row for row in found if row.get("digest", "") == max(digests, key=digests.count)}


def _value(row: Table, number: int, measure: str) -> float | None:
    """A test's value; or the mean of the last four tests up to it; or how much the loss jumps from test to test."""
    if measure in ("spread_first", "spread_last"):
        return _spread(row, measure) if number == row["rounds"] else None
    if measure in ("variance_share", "variance_slope"):
        return _variance(row, measure) if number == row["rounds"] else None
    if measure == "f1_gap":
        f1, accuracy = _value(row, number, "f1"), _value(row, number, "accuracy")
        return None if f1 is None or accuracy is None else f1 - accuracy
    key = measure
    if measure == "own_rows":  # FedBN's global model has no trained norm layers
        key = "personal_accuracy_mean" if "personal_accuracy_mean" in row["tests"][-1] else "client_accuracy_mean"
    elif measure in ("last_four", "mean_of_rounds"):
        key = "accuracy"
    elif measure in ("roughness", "rises"):
        key = "loss"
    if not any(test["round"] == number and key in test for test in row["tests"]):
        return None
    tests = [float(test[key]) for test in row["tests"] if test["round"] <= number and key in test]
    if measure == "last_four":
        return math.fsum(tests[-LAST_TESTS:]) / LAST_TESTS if len(tests) >= LAST_TESTS else None
    if measure == "mean_of_rounds":
        return math.fsum(tests) / len(tests)
    if measure == "rises":
        return math.fsum(max(0.0, b - a) for a, b in itertools.pairwise(tests))
    if measure == "roughness":
        steps = [b - a for a, b in itertools.pairwise(tests)]
        return statistics.stdev(steps) if len(steps) > 1 else None
    return tests[-1]


def _spread(row: Table, measure: str) -> float | None:
    """The largest minus the smallest learned weight, in the first three rounds (means over them) or in the last."""
    if "learned" not in row:
        return None
    rounds = row["learned"][:3] if measure == "spread_first" else row["learned"][-1:]
    means = [math.fsum(weights) / len(rounds) for weights in zip(*rounds)]
    return max(means) - min(means)


def _variance(row: Table, measure: str) -> float:
    """Of the variances of learned weights v(T): the largest v sqrt(T), or the slope of log v over log T.

    The tests of such a row are the numbers of rounds T for which weights were learned.
    """
    found = [(test["round"], test["variance"]) for test in row["tests"]]
    if measure == "variance_share":
        return max(value * math.sqrt(rounds) for rounds, value in found)
    return float(stats.linregress([math.log(n) for n, _ in found], [math.log(value) for _, value in found]).slope)


def _rounds_to(row: Table, target: float) -> int | None:
    """The first round at the target; one more than all if it was never reached. None: not all rounds were tested."""
    if [test["round"] for test in row["tests"]] != list(range(1, len(row["tests"]) + 1)):
        return None
    for test in row["tests"]:
        if test["accuracy"] >= target:
            return int(test["round"])
    return None if row["status"] == "cut short" else int(row["rounds"]) + 1


def by_print(claim: Table, stored: Mapping[str, Any]) -> FileSettings | None:
    """Differences, intervals or means that exist only as they were printed."""
    for pair in stored.get("paired", ()):
        sign = _sign(pair, claim)
        if sign and "differences" in pair:
            return interval([sign * value for value in pair["differences"]], pair["round"], "as printed")
        if sign:
            low, high = sorted((sign * pair["low"], sign * pair["high"]))
            error = (high - low) / 2 / float(stats.t.ppf(1 - LEVEL / 2, pair["n"] - 1))
            mean = sign * pair["mean"]
            return FileSettings(
                n=pair["n"], mean=mean, low=low, high=high, error=error, round=pair["round"], note="as printed"
            )
    if claim.get("measure", "accuracy") != "accuracy":
        return None
    means = {one["method"]: one for one in stored.get("summaries", ())}
    others = baselines(claim)
    mine, theirs = means.get(claim["method"]), means.get(others[0]) if len(others) == 1 else None
    if mine is None or theirs is None:
        return None
    note = f"as printed: means over {mine['n']} seeds, not paired"
    return FileSettings(n=mine["n"], mean=mine["mean"] - theirs["mean"], round=mine["round"], note=note)


def _sign(pair: Mapping[str, Any], claim: Table) -> int:
    wanted = [claim["method"], *baselines(claim)]
    if pair.get("measure", "accuracy") != claim.get("measure", "accuracy"):
        return 0
    if wanted == [pair["method"], pair["baseline"]]:
        return 1
    return -1 if wanted == [pair["baseline"], pair["method"]] else 0
