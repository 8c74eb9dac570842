"""Writes the tables in reproductions.md and methods/*.md from docs/results; docs/verdicts.py computes the verdicts.

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
from verdicts import CONFIRMED, CONTRADICTED, OPEN, RESULTS, FileSettings, Table, baselines, judged, measured, survives

PAGE = Path(__file__).with_name("reproductions.md")
METHODS = PAGE.parent / "methods"
LEARNED = Path(__file__).parents[1] / "recipes" / "duw_2_learned.toml"
STARTS = ("1", "2", "3", "4", "3_tenth")  # of docs/results/duw_environment_NAME.json
PLANNED = 5  # starts of each environment, by default those of benchmarks/duw_starts.py
NAMES = {"fedavg": "FedAvg", "dr_fedavg": "DR-FedAvg", "duw_fedavg": "DUW-FedAvg"}
FAVOURED = {  # clients that the paper says are emphasised, and their share of the rows
    "1": ("I, client 4 (52 % of the rows)", (4,)),
    "2": ("II, clients 0 and 1 together (40 %)", (0, 1)),
    "3": ("III, client 0 (20 %)", (0,)),
    "4": ("IV, clients 3 and 4 together (40 %)", (3, 4)),
}
BEGIN, END = "<!-- {}: written by docs/make_reproductions.py -->", "<!-- end of {} -->"


def shown(claim: Table, found: FileSettings | None) -> str:
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
            _verdict(claim, found, word, held),
            claim.get("why", ""),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _verdict(claim: Table, found: FileSettings | None, word: str, held: bool) -> str:
    """The word with its marks, and whether a claimed size is shown or only not ruled out."""
    if word == OPEN:
        return word
    text = f"**{word}**" + (" here" if claim.get("stand_in") else "") + ("" if held else " †")
    low = found.low if found is not None else None
    if word == CONFIRMED and claim["kind"] in ("higher", "lower") and low is not None and low < claim.get("points", 0):
        text += f"; {claim['points']:g} points are not ruled out, nor shown"
    return text


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
    for name in STARTS:
        learned = [row for row in stored([RESULTS], f"duw_environment_{name}") if row.get("learned")]
        kind = learned[0]["device"].partition(",")[0]
        took = [row["seconds"] / 60 for row in learned if row.get("seconds")]
        each = f"{statistics.median(took):.1f}" if took else "4.0"  # as duw.md says of Environment II
        cells = [f"`duw_environment_{name}` (`benchmarks/duw_starts.py`)", kind, f"1 x {PLANNED}"]
        lines.append(f"| {' | '.join(cells)} | {len(learned)} | {PLANNED - len(learned)} | {each} |")
    return "\n".join(lines)


def variance_table() -> str:
    """Variance of learned weights over T rounds: the mean and the range over the starts."""
    rows = stored([RESULTS], "duw_variance")
    if not rows:
        return "No run is stored with its tests yet."
    lines = ["| rounds T | mean variance | lowest and highest | 1/sqrt(T) | starts |", "|---|---|---|---|---|"]
    for at, test in enumerate(rows[0]["tests"]):
        values = [row["tests"][at]["variance"] for row in rows]
        cells = [f"{statistics.fmean(values):.1e}", f"{min(values):.1e} to {max(values):.1e}"]
        lines.append(f"| {test['round']} | {' | '.join(cells)} | {test['round'] ** -0.5:.4f} | {len(rows)} |")
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
        how += ", as printed" if row["status"] == "printed" else ""
        lines.append(f"| {row['seed']} | {NAMES[recipe]}{comma}{how} | {' | '.join(values)} |")
    return "\n".join(lines)


def favoured_table() -> str:
    """How much of the learned weight the clients have that the paper says are emphasised."""
    lines = ["| | rounds 1 to 9, lowest and highest | round 10 | starts |", "|---|---|---|---|"]
    for name, (label, clients) in FAVOURED.items():
        rows = [row for row in stored([RESULTS], f"duw_environment_{name}") if "learned" in row]
        if rows:
            shares = [[100 * math.fsum(weights[k] for k in clients) for weights in row["learned"]] for row in rows]
            early, late = [share for one in shares for share in one[:-1]], [one[-1] for one in shares]
            texts = [f"{min(values):.0f} to {max(values):.0f} %" for values in (early, late)]
            texts = [texts[0], texts[1] if len(rows) > 1 else f"{late[0]:.0f} %"]
            lines.append(f"| {label} | {' | '.join(texts)} | {', '.join(str(row['seed']) for row in rows)} |")
    return "\n".join(lines)


def weight_table() -> str:
    """The weights of recipes/duw_2_learned.toml, by client and round."""
    table = tomllib.loads(LEARNED.read_text(encoding="utf-8"))["algorithm"]["weighting"]["table"]
    lines = ["| client | " + " | ".join(f"round {number}" for number in range(1, len(table) + 1)) + " |"]
    lines += ["|---" * (len(table) + 1) + "|"]
    for client, column in enumerate(zip(*table)):
        lines.append(f"| {client} | " + " | ".join(f"{weight:.3f}" for weight in column) + " |")
    return "\n".join(lines)


def level_table(name: str, number: int) -> str:
    """Accuracy after a round: methods by the Dirichlet parameters of the experiments NAME_002, NAME_005 and NAME_01."""
    columns = {f"0.{path.stem.removeprefix(name)[2:]}": path.stem for path in sorted(RESULTS.glob(f"{name}_0*.json"))}
    rows = {label: [row for row in stored([RESULTS], stem) if row["tests"]] for label, stem in columns.items()}
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for method in dict.fromkeys(row["method"] for found in rows.values() for row in found):
        cells = [_level([row for row in found if row["method"] == method], number) for found in rows.values()]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _level(rows: Sequence[Table], number: int) -> str:
    """Mean and deviation over the seeds that have reached a round; printed rows only where there are no others."""
    for printed in (False, True):
        mine = [row for row in rows if printed == (row["status"] == "printed")]
        values = [100 * test["accuracy"] for row in mine for test in row["tests"] if test["round"] == number]
        if values:
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            seeds = "as printed" if printed else f"{len(values)} seed{'s' if len(values) > 1 else ''}"
            return f"{statistics.fmean(values):.1f}{spread} ({seeds})"
    return "–"


def tables() -> dict[Path, dict[str, str]]:
    """The tables of each page, by name."""
    claims = tomllib.loads((RESULTS / "claims.toml").read_text(encoding="utf-8"))["claim"]
    pages = {page: _by_name(page.read_text(encoding="utf-8")) for page in (PAGE, *sorted(METHODS.glob("*.md")))}
    pages[PAGE] |= {"counts": count_table(claims), "remaining": remaining_table()}
    holds = survives([judged(claim, measured(claim))[1] for claim in claims])
    for paper in dict.fromkeys(claim["paper"] for claim in claims):
        mine = [place for place, claim in enumerate(claims) if claim["paper"] == paper]
        table = claim_table([claims[place] for place in mine], [holds[place] for place in mine])
        pages[PAGE][f"claims of {paper}"] = table
    pages[METHODS / "duw.md"] |= {f"starts of environment {name}": start_table(name) for name in STARTS}
    duw = {"favoured clients": favoured_table(), "weights of start 0": weight_table(), "variance": variance_table()}
    pages[METHODS / "duw.md"] |= duw
    return pages


def _by_name(text: str) -> dict[str, str]:
    """The tables of an experiment that a page has a place for."""
    found = {}
    for name in re.findall(r"<!-- rounds of (\w+): written by", text):
        found[f"rounds of {name}"] = round_table(name)
    for name in re.findall(r"<!-- clients' models of (\w+): written by", text):
        found[f"clients' models of {name}"] = round_table(name, "local_accuracy_mean")
    for name, number in re.findall(r"<!-- accuracy of (\w+) after round (\d+): written by", text):
        found[f"accuracy of {name} after round {number}"] = level_table(name, int(number))
    return found


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
