"""Writes the tables in reproductions.md: verdicts computed by rule from docs/results.

`python docs/make_reproductions.py` writes them; with `--check` it fails if they are not up to date.
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # where the plan of runs is

from reproduction_cells import cells_of, missing, read_experiments, stored

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).with_name("reproductions.md")
BEGIN, END = "<!-- {}: written by docs/make_reproductions.py -->", "<!-- end of {} -->"
LEVEL, POWER = 0.05, 0.8
ENOUGH = 3  # pairs; with fewer no interval of use can be computed
LAST_TESTS = 4
CONFIRMED, CONTRADICTED, OPEN = "confirmed", "contradicted", "open"

Table = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the stored rows say: a mean (of differences, or of levels) in points, and how sure it is."""

    n: int
    mean: float
    low: float | None = None
    high: float | None = None
    seen: float | None = None  # the difference that so many seeds would have shown with a power of 80 %
    round: int = 0
    by_seed: tuple[float, ...] = ()
    note: str = ""


def interval(values: Sequence[float], round: int, note: str = "") -> Found:
    """Mean and 95 % interval by Student's t."""
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return Found(n=n, mean=mean, round=round, by_seed=tuple(values), note=note)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * error
    seen = half + float(stats.t.ppf(POWER, n - 1)) * error
    return Found(
        n=n, mean=mean, low=mean - half, high=mean + half, seen=seen, round=round, by_seed=tuple(values), note=note
    )


def verdict(claim: Table, found: Found | None) -> str:
    """By rule: only an interval over at least three seeds confirms or contradicts.

    higher: confirmed if all of it is above 0 and some of it reaches the claimed points; contradicted if all of it is
    below 0 or below the claimed points. equal: all of it within, or all of it outside. at_least, at_most: all of it on
    the claimed side, or on the other.
    """
    if found is None or found.n < ENOUGH or found.low is None or found.high is None:
        return OPEN
    kind, points = claim["kind"], float(claim.get("points", 0.0))
    low, high = found.low, found.high
    if kind == "higher":
        right, wrong = low > 0 and high >= points, high < 0 or high < points
    elif kind == "equal":
        right, wrong = -points <= low and high <= points, low > points or high < -points
    elif kind == "at_least":
        right, wrong = low >= points, high < points
    else:
        right, wrong = high <= points, low > points
    return CONFIRMED if right else CONTRADICTED if wrong else OPEN


def measured(claim: Table) -> Found | None:
    """What is stored for a claim; None if nothing is."""
    if "kind" not in claim:
        return None
    path = RESULTS / f"{claim['experiment']}.json"
    if not path.exists():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    by_rows = _by_rows(claim, stored["rows"])
    printed = _by_print(claim, stored)
    return by_rows if by_rows is not None and (printed is None or by_rows.n >= printed.n) else printed


def _by_rows(claim: Table, rows: Sequence[Table]) -> Found | None:
    """Pairs, or single runs, at the round that most seeds have reached; the latest of those."""
    names = [claim[key] for key in ("method", "baseline") if key in claim]
    for printed in (False, True):  # measured rows replace printed ones, and the two are never paired
        found = [_of(rows, name, printed) for name in names]
        if all(found):
            break
    else:
        return None
    mine, theirs = found[0], found[-1]
    measure = claim.get("measure", "accuracy")
    values: dict[int, list[float]] = {}
    for key, row in mine.items():
        for test in row["tests"]:
            number = test["round"]
            own = _value(row, number, measure)
            other = _value(theirs[key], number, measure) if key in theirs else None
            if "baseline" not in claim and own is not None:
                values.setdefault(number, []).append(100 * own)
            elif own is not None and other is not None:
                values.setdefault(number, []).append(100 * (own - other))
    if not values:
        return None
    chosen = max(values, key=lambda number: (len(values[number]), number))
    used = [row for key, row in mine.items() if "baseline" not in claim or key in theirs]
    planned = max(row["planned"] for row in used)
    notes = ["as printed"] if any(row["status"] == "printed" for row in used) else []
    notes += [f"{chosen} of {planned} rounds"] if chosen < planned else []
    return interval(values[chosen], chosen, "; ".join(notes))


def _of(rows: Sequence[Table], method: str, printed: bool) -> dict[Any, Table]:
    """A method's rows by seed; of several settings that it was run with, those of most rows."""
    found = [
        row for row in rows if row["method"] == method and row["tests"] and printed == (row["status"] == "printed")
    ]
    digests = [row.get("digest", "") for row in found]
    return {row["seed"]: row for row in found if row.get("digest", "") == max(digests, key=digests.count)}


def _value(row: Table, number: int, measure: str) -> float | None:
    """A test's value, or the mean of the last four tests up to it."""
    key = "accuracy" if measure == "last_four" else measure
    tests = [test[key] for test in row["tests"] if test["round"] <= number and key in test]
    at = [test for test in row["tests"] if test["round"] == number and key in test]
    if not at:
        return None
    if measure != "last_four":
        return float(at[0][key])
    return math.fsum(tests[-LAST_TESTS:]) / LAST_TESTS if len(tests) >= LAST_TESTS else None


def _by_print(claim: Table, stored: Table) -> Found | None:
    """Differences, intervals or means that exist only as they were printed."""
    for pair in stored.get("paired", ()):
        sign = _sign(pair, claim)
        if sign and "differences" in pair:
            return interval([sign * value for value in pair["differences"]], pair["round"], "as printed")
        if sign:
            ends = sorted((sign * pair["low"], sign * pair["high"]))
            seen = None  # the printed interval says what could have been seen
            return Found(
                n=pair["n"],
                mean=sign * pair["mean"],
                low=ends[0],
                high=ends[1],
                seen=seen,
                round=pair["round"],
                note="as printed",
            )
    means = {one["method"]: one for one in stored.get("summaries", ())}
    mine, theirs = means.get(claim["method"]), means.get(claim.get("baseline", ""))
    if mine is None or theirs is None:
        return None
    note = f"as printed: means over {mine['n']} seeds, not paired"
    return Found(n=mine["n"], mean=mine["mean"] - theirs["mean"], round=mine["round"], note=note)


def _sign(pair: Table, claim: Table) -> int:
    wanted = claim["method"], claim.get("baseline")
    if wanted == (pair["method"], pair["baseline"]):
        return 1
    return -1 if wanted == (pair["baseline"], pair["method"]) else 0


def shown(claim: Table, found: Found | None) -> str:
    """The result with its interval, and what could have been seen."""
    if found is None:
        return "not run"
    signed = "+.1f" if "baseline" in claim else ".1f"
    text = f"{found.mean:{signed}}"
    if found.low is not None and found.high is not None:
        text += f" ({found.low:{signed}} to {found.high:{signed}})"
    if found.seen is not None and "baseline" in claim:
        text += f"; could have seen {found.seen:.1f}"
    return text + (f"; {found.note}" if found.note else "")


def claim_table(claims: Sequence[Table]) -> str:
    """One line for every claim."""
    lines = [
        "| claim | where | setting and command | seeds | result, points | verdict | explanation |",
        "|---|---|---|---|---|---|---|",
    ]
    for claim in claims:
        found = measured(claim)
        command = f"; `{claim['command']}`" if claim.get("command", "as above") != "as above" else ""
        cells = [
            claim["claim"],
            claim["where"],
            claim["setting"] + command,
            str(found.n) if found else "0",
            shown(claim, found),
            f"**{verdict(claim, found)}**" if found and verdict(claim, found) != OPEN else OPEN,
            claim.get("why", ""),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def count_table(claims: Sequence[Table]) -> str:
    """How many claims of every paper are confirmed, contradicted and open."""
    lines = ["| paper | claims | confirmed | contradicted | open |", "|---|---|---|---|---|"]
    for paper in dict.fromkeys(claim["paper"] for claim in claims):
        found = [verdict(claim, measured(claim)) for claim in claims if claim["paper"] == paper]
        counts = [str(found.count(word)) for word in (CONFIRMED, CONTRADICTED, OPEN)]
        lines.append(f"| {paper} | {len(found)} | {' | '.join(counts)} |")
    return "\n".join(lines)


def remaining_table() -> str:
    """What `benchmarks/reproduce.py` would still run, by experiment."""
    lines = [
        "| experiment | runs on | methods x seeds | runs stored | missing | minutes each |",
        "|---|---|---|---|---|---|",
    ]
    for one in read_experiments():
        rows = stored([RESULTS], one.name)
        cells = cells_of(one, rows)
        todo = missing(cells, rows)
        each = math.fsum(cell.seconds for cell in cells) / len(cells) / 60
        plan = f"{len({cell.method for cell in cells})} x {len(one.seeds)}"
        lines.append(f"| `{one.name}` | {one.device} | {plan} | {len(cells) - len(todo)} | {len(todo)} | {each:.1f} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """The page with its tables as they are now."""
    claims = tomllib.loads((RESULTS / "claims.toml").read_text(encoding="utf-8"))["claim"]
    tables = {"counts": count_table(claims), "remaining": remaining_table()}
    for paper in dict.fromkeys(claim["paper"] for claim in claims):
        tables[f"claims of {paper}"] = claim_table([claim for claim in claims if claim["paper"] == paper])
    for name, table in tables.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise SystemExit(f"{PAGE.name} has no place for {name}: write {begin} and {end}")
        text = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def main(arguments: Sequence[str]) -> int:
    """Write the page, or say whether it is up to date."""
    before = PAGE.read_text(encoding="utf-8")
    after = written(before)
    if "--check" in arguments:
        return 0 if before == after else 1
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
