"""Writes the tables of transformers.md from docs/results/transformers.json.

`python docs/make_transformers.py` writes them; with `--check` it fails if they are not up to date. `--store FOLDER`
first takes over what is below a folder: runs of recipes/compare_simprox_banking77_transformer.toml (their
metrics.jsonl, config.toml and run.json) and the adapters_speed.json of benchmarks/adapters_speed.py; what is not
there stays as it was.
"""

from __future__ import annotations

import json
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE, RESULTS = DOCS / "transformers.md", DOCS / "results" / "transformers.json"
BEGIN, END = "<!-- {}: written by docs/make_transformers.py -->", "<!-- end of {} -->"
TARGET = 0.8
ORDER = ("all weights", "LoRA, rank 8", "LoRA, rank 2", "head")
Table = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Store, write or check."""
    if arguments[:1] == ["--store"]:
        store(Path(arguments[1]))
    page = PAGE.read_text(encoding="utf-8")
    found: Table = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    new = filled(filled(page, "accuracy", accuracy(found.get("runs", []))), "speed", speed(found.get("speed", [])))
    if "--check" in arguments:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def store(folder: Path) -> None:
    """Take over runs and speeds below a folder."""
    found: Table = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": [], "speed": []}
    runs = {(run["method"], run["seed"]): run for run in found["runs"]}
    for file in sorted(folder.rglob("metrics.jsonl")):
        run = _run(file.parent)
        runs[run["method"], run["seed"]] = run
    found["runs"] = list(runs.values())
    measured = {_what(row): row for row in found["speed"]}
    for file in sorted(folder.rglob("adapters_speed.json")):
        measured.update({_what(row): row for row in json.loads(file.read_text())})
    found["speed"] = list(measured.values())
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def _what(row: Table) -> tuple[str, str, str]:
    return row["workload"], row["precision"], row["how"]


def _run(folder: Path) -> Table:
    config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    model, facts = config["model"], json.loads((folder / "run.json").read_text())
    method = {"all": "all weights", "head": "head"}.get(model["train"], f"LoRA, rank {model['rank']}")
    tests = [[row["round"], row["accuracy"], row["bytes_up_total"]] for row in rows if row.get("accuracy") is not None]
    return {
        "method": method,
        "seed": config.get("seed", 0),
        "parameters": facts["parameters"],
        "tests": tests,
    }


def filled(page: str, name: str, text: str) -> str:
    """The page with another text between a table's marks."""
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def accuracy(runs: list[Table]) -> str:
    """Accuracy against bytes sent, by method: at the last round that all have been tested after, and at the end."""
    if not runs:
        return "No results are stored yet."
    lines = [
        "| Trained | Parameters sent | After round | Accuracy | MB up | MB up until 80 % | Seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    known = [method for method in ORDER if any(run["method"] == method for run in runs)]
    ends = {m: min(run["tests"][-1][0] for run in runs if run["method"] == m) for m in known}
    for method in known:
        mine = [run for run in runs if run["method"] == method]
        for number in sorted({min(ends.values()), ends[method]}):
            tests = [next(test for test in run["tests"] if test[0] == number) for run in mine]
            values = [100 * test[1] for test in tests]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            reached = [
                next((sent for done, value, sent in run["tests"] if value >= TARGET and done <= number), None)
                for run in mine
            ]
            until = [sent for sent in reached if sent is not None]
            text = f"{statistics.mean(until) / 1e6:,.1f}" if len(until) == len(mine) else "not reached"
            total = statistics.mean(test[2] for test in tests) / 1e6
            lines.append(
                f"| {method} | {mine[0]['parameters']:,} | {number} | {statistics.mean(values):.1f}{spread} % "
                f"| {total:,.1f} | {text} | {len(mine)} |"
            )
    return "\n".join(lines)


def speed(rows: list[Table]) -> str:
    """Rows a second and memory, by workload."""
    if not rows:
        return "No results are stored yet."
    lines = ["| Workload | Precision | How | Rows/s | Peak GiB |", "|---|---|---|---|---|"]
    for row in rows:
        start = f"| {row['workload']} | {row['precision']} | {row['how']} "
        lines.append(f"{start}| {row['rows_per_s']:,.0f} | {row['gib']:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
