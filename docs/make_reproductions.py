"""Writes the tables in reproductions.md and methods/duw.md from docs/results; docs/verdicts.py computes the verdicts.

`python docs/make_reproductions.py` writes them; with `--check` it fails if they are not up to date.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # where the plan of runs is
sys.path.insert(0, str(Path(__file__).parent))

from reproduction_cells import cells_of, missing, read_experiments, stored
from verdicts import CONFIRMED, CONTRADICTED, OPEN, RESULTS, Found, Table, baselines, judged, measured, survives

PAGE = Path(__file__).with_name("reproductions.md")
DUW = Path(__file__).parent / "methods" / "duw.md"
STARTS = ("1", "2", "3", "4", "3_tenth")  # of docs/results/duw_environment_NAME.json
NAMES = {"fedavg": "FedAvg", "dr_fedavg": "DR-FedAvg", "duw_fedavg": "DUW-FedAvg"}
BEGIN, END = "<!-- {}: written by docs/make_reproductions.py -->", "<!-- end of {} -->"


def shown(claim: Table, found: Found | None) -> str:
    """The result with its interval, and what could have been seen."""
    if found is None:
        return "not run"
    if claim["kind"] == "arithmetic":
        return f"computed: {found.mean:.2f}"
    unit = claim.get("unit", "")
    fine = claim.get("measure") == "roughness" or (found.seen is not None and found.seen < 0.1)
    digits = ".2f" if fine else ".1f"
    signed = ("+" if baselines(claim) else "") + digits
    text = f"{found.mean:{signed}}"
    if found.low is not None and found.high is not None:
        text += f" ({found.low:{signed}} to {found.high:{signed}})"
    text += f" {unit}" if unit else ""
    if claim["kind"] == "equal":
        text += f"; margin {claim['points']:g}"
    elif found.seen is not None and baselines(claim):
        text += f"; could have seen {found.seen:{digits}}"
    return text + (f"; {found.note}" if found.note else "")


def claim_table(claims: Sequence[Table], holds: Sequence[bool]) -> str:
    """One line for every claim."""
    lines = [
        "| claim | where | setting and command | seeds | result, points | verdict | explanation |",
        "|---|---|---|---|---|---|---|",
    ]
    for claim, held in zip(claims, holds):
        found = measured(claim)
        command = f"; `{claim['command']}`" if claim.get("command", "as above") != "as above" else ""
        word = judged(claim, found)[0]
        cells = [
            claim["claim"],
            claim["where"],
            claim["setting"] + command,
            "–" if claim.get("kind") == "arithmetic" else str(found.n) if found else "0",
            shown(claim, found),
            word
            if word == OPEN
            else f"**{word}**" + (" here" if claim.get("stand_in") else "") + ("" if held else " †"),
            claim.get("why", ""),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _how(claim: Table) -> str:
    """What a verdict rests on, if not on runs of the claim's own setting."""
    return " by computation" if claim["kind"] == "arithmetic" else " here" if claim.get("stand_in") else ""


def count_table(claims: Sequence[Table]) -> str:
    """How many claims of every paper are confirmed, contradicted and open, and by what."""
    lines = [
        "| paper | claims | confirmed by runs | computed | contradicted by runs | computed | open | never run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for paper in dict.fromkeys(claim["paper"] for claim in claims):
        mine = [claim for claim in claims if claim["paper"] == paper]
        found = [measured(claim) for claim in mine]
        words = [(judged(claim, one)[0], claim.get("kind") == "arithmetic") for claim, one in zip(mine, found)]
        kinds = [(word, computed) for word in (CONFIRMED, CONTRADICTED) for computed in (False, True)]
        counts = [str(words.count(kind)) for kind in (*kinds, (OPEN, False))]
        lines.append(f"| {paper} | {len(mine)} | {' | '.join(counts)} | {found.count(None)} |")
    return "\n".join(lines)


def round_table(name: str, key: str = "accuracy") -> str:
    """Means of the methods of an experiment at its tests; the last one with its deviation over the seeds."""
    every = stored([RESULTS], name)
    rows = [row for row in every if row["status"] == "finished"] or [row for row in every if row["status"] == "printed"]
    methods = {
        label: [row for row in rows if row["method"] == label] for label in dict.fromkeys(r["method"] for r in rows)
    }
    if not methods:
        return "No run is stored with its tests yet."
    tests = min(len(row["tests"]) for row in rows)  # methods with fewer, longer rounds are tested as often
    shown = sorted({round(step * tests / 6) for step in range(1, 7)} - {0}) if tests > 10 else range(1, tests + 1)
    first = max(rows, key=lambda row: row["rounds"])["tests"]
    lines = ["| round | " + " | ".join(str(first[at - 1]["round"]) for at in shown) + " | seeds |"]
    lines += ["|---" * (len(shown) + 2) + "|"]
    for label, mine in methods.items():
        cells = []
        for at in shown:
            values = [100 * row["tests"][at - 1][key] for row in mine]
            cells.append(f"{statistics.fmean(values):.1f}")
            if at == shown[-1] and len(values) > 1:
                cells[-1] += f" ± {statistics.stdev(values):.1f}"
        lines.append(f"| {label} | {' | '.join(cells)} | {len(mine)} |")
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


def start_table(environment: str) -> str:
    """The accuracies of every round of one of DUW's environments, start by start."""
    rows = stored([RESULTS], f"duw_environment_{environment}")
    rounds = max(len(row["tests"]) for row in rows)
    lines = ["| start | method | " + " | ".join(map(str, range(1, rounds + 1))) + " |", "|---" * (rounds + 2) + "|"]
    for row in sorted(rows, key=lambda row: (row["seed"], [*NAMES].index(row["method"].split(",")[0]), row["method"])):
        recipe, comma, how = row["method"].partition(", ")
        values = [f"{100 * test['accuracy']:.1f}" for test in row["tests"]]
        values[-1] = f"**{values[-1]}**"
        lines.append(f"| {row['seed']} | {NAMES[recipe]}{comma}{how} | {' | '.join(values)} |")
    return "\n".join(lines)


def tables() -> dict[Path, dict[str, str]]:
    """The tables of each page, by name."""
    claims = tomllib.loads((RESULTS / "claims.toml").read_text(encoding="utf-8"))["claim"]
    found = {"counts": count_table(claims), "remaining": remaining_table()}
    text = PAGE.read_text(encoding="utf-8")
    for name in re.findall(r"<!-- rounds of (\w+): written by", text):
        found[f"rounds of {name}"] = round_table(name)
    for name in re.findall(r"<!-- clients' models of (\w+): written by", text):
        found[f"clients' models of {name}"] = round_table(name, "local_accuracy_mean")
    holds = survives([judged(claim, measured(claim))[1] for claim in claims])
    for paper in dict.fromkeys(claim["paper"] for claim in claims):
        mine = [place for place, claim in enumerate(claims) if claim["paper"] == paper]
        found[f"claims of {paper}"] = claim_table([claims[place] for place in mine], [holds[place] for place in mine])
    return {PAGE: found, DUW: {f"starts of environment {name}": start_table(name) for name in STARTS}}


def written() -> dict[Path, str]:
    """Every page with its tables as they are now."""
    pages = {}
    for page, found in tables().items():
        text = page.read_text(encoding="utf-8")
        for name, table in found.items():
            begin, end = BEGIN.format(name), END.format(name)
            before, there, rest = text.partition(begin)
            if not there or end not in rest:
                raise SystemExit(f"{page.name} has no place for {name}: write {begin} and {end}")
            text = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
        pages[page] = text
    return pages


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or say whether they are up to date."""
    pages = written()
    if "--check" in arguments:
        return int(any(page.read_text(encoding="utf-8") != text for page, text in pages.items()))
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
