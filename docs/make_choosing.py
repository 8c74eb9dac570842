"""Writes the tables of choosing.md from the tuned comparisons in docs/results.

`python docs/make_choosing.py` writes them; with `--check` it fails if they are not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from make_comparison import results

DOCS = Path(__file__).parent
PAGE = DOCS / "choosing.md"
SHORT = {"digits_skew": "digits, label skew", "banking77": "Banking77, label and size skew", "domains": "feature shift"}
CEILING = "centralised"
SYSTEMS = ("simprox", "fedprox_fedsplit", "fedsiam_da", "simfedswap")  # of the five, DUW needs a learned schedule

Task = dict[str, Any]


def difference(task: Task, label: str, quality: str) -> tuple[float, bool] | None:
    """Points above the baseline, and whether the paired t test shows a difference at 5 %; None where it was not run."""
    if label == task["baseline"]:
        return 0.0, False
    method = next((one for one in task["methods"] if one["label"] == label), None)
    found = (method or {}).get("against", {}).get(quality)
    return (100 * found["mean"], found["verdict"] != "not shown") if found else None


def ranked(quality: str, personal: bool | None = None) -> list[tuple[str, list[tuple[float, bool]]]]:
    """The methods that every task has, best mean difference first."""
    tasks = results()
    rows = []
    for method in tasks[0]["methods"]:
        if personal is not None and method["personal"] != personal:
            continue
        found = [difference(task, method["label"], quality) for task in tasks]
        if all(one is not None for one in found) and method["label"] not in (CEILING, tasks[0]["baseline"]):
            rows.append((method["label"], [one for one in found if one is not None]))
    return sorted(rows, key=lambda row: -sum(points for points, _ in row[1]) / len(row[1]))


def table(rows: list[tuple[str, list[tuple[float, bool]]]]) -> str:
    """One row per method: points above tuned FedAvg on each task, and their mean."""
    lines = [
        "| method | " + " | ".join(SHORT[task["task"]] for task in results()) + " | mean |",
        "|---|---|---|---|---|",
    ]
    for label, found in rows:
        cells = [f"**{points:+.1f}**" if shown else f"{points:+.1f}" for points, shown in found]
        mean = sum(points for points, _ in found) / len(found)
        lines.append(f"| `{label}` | " + " | ".join(cells) + f" | {mean:+.1f} |")
    return "\n".join(lines)


def baselines() -> str:
    """What the differences are differences from, and the ceiling."""
    lines = ["| | " + " | ".join(SHORT[task["task"]] for task in results()) + " |", "|---|---|---|---|"]
    for label, title in (("fedavg", "tuned `fedavg`"), (CEILING, "all rows in one place (`centralised`)")):
        found = [next(one for one in task["methods"] if one["label"] == label) for task in results()]
        cells = [f"{100 * one['qualities']['accuracy']['mean']:.1f}" for one in found]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """The tables of the page by name."""
    one_model = ranked("accuracy", personal=False)
    own_models = ranked("clients_mean", personal=True)
    systems = [row for row in ranked("accuracy") if row[0] in SYSTEMS]
    return {
        "baselines": baselines(),
        "one model": table(one_model[:8]),
        "own models": table(own_models[:6]),
        "worst clients": table(ranked("clients_worst_tenth")[:6]),
        "systems": table(systems),
    }


def written() -> str:
    """The page with its tables up to date."""
    text = PAGE.read_text(encoding="utf-8")
    for name, found in tables().items():
        begin, end = f"<!-- {name}: written by docs/make_choosing.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{found}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if written() == PAGE.read_text(encoding="utf-8") else f"{PAGE}: run `python docs/make_choosing.py`")
    PAGE.write_text(written(), encoding="utf-8")
