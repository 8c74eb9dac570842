"""Writes the tables of comparison.md and the evidence behind `consilience diagnose`, from the results in docs/results.

`python docs/make_comparison.py` writes them; with `--check` it fails if they are not up to date. `--store RUNS` first
takes results over from a folder that holds tune-NAME and compare-NAME for the recipes tune_NAME.toml, and measures how
heterogeneous these tasks are (their data are read from $CONSILIENCE_DATA). `--store RUNS METHOD ...` takes over these
methods alone, which were tuned again or are new; all else stays as it is stored.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from verdicts import survives

DOCS = Path(__file__).parent
PAGE, RESULTS = DOCS / "comparison.md", DOCS / "results"
EVIDENCE = DOCS.parent / "consilience" / "diagnose" / "evidence.json"
BEGIN, END = "<!-- tables: written by docs/make_comparison.py -->", "<!-- end of tables -->"
TITLES = {
    "digits_skew": "label skew: digits, ten clients, Dirichlet 0.1",
    "banking77": "text with label and size skew: Banking77 as hashed n-grams, twenty clients with twenty intents each",
    "domains": "feature shift: MNIST, MNIST-M and USPS, three clients of each",
}
KEPT = ("accuracy", "clients_mean", "clients_worst_tenth")
SHOWN = ("mean", "low", "high", "p_t", "p_permutation", "verdict", "n")


def results() -> list[dict[str, Any]]:
    """The stored results of each task, in the order of the titles."""
    files = [RESULTS / f"tuned_{name}.json" for name in TITLES]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def store(runs: Path, only: Sequence[str] = ()) -> None:
    """Results of the runs, as far as the page and the advice need them; of some methods, into what is stored."""
    for name in TITLES:
        folder = runs / f"compare-{name}"
        if not (folder / "results.json").exists():
            continue
        found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        study = json.loads((runs / f"tune-{name}" / "tuned.json").read_text(encoding="utf-8"))
        tuned = {method["label"]: method for method in study["methods"]}
        kept = {
            "task": name,
            "title": TITLES[name],
            "recipe": f"recipes/tune_{name}.toml",
            "stored": date.today().isoformat(),
            "torch": sorted({cell["code"]["torch"] for cell in found["cells"] if cell["code"]}),
            "trials": study["trials"],
            "tuning_seeds": study["seeds"],
            "validation": study["validation"],
            "seeds": found["seeds"],
            "rounds": study["base"]["rounds"],
            "baseline": found["baseline"],
            "heterogeneity": {} if only else measured(name),
            "methods": [_kept(method, tuned[method["label"]]) for method in found["methods"]],
        }
        if only:
            kept = _replaced(json.loads((RESULTS / f"tuned_{name}.json").read_text(encoding="utf-8")), kept, only)
        text = json.dumps(kept, indent=1, sort_keys=True)
        (RESULTS / f"tuned_{name}.json").write_text(text + "\n", encoding="utf-8")


def _replaced(stored: dict[str, Any], new: dict[str, Any], only: Sequence[str]) -> dict[str, Any]:
    """What is stored, with some methods as they are in a newer study of the same task with the same budget."""
    same = ("trials", "tuning_seeds", "validation", "seeds", "rounds", "baseline")
    other = [key for key in same if stored[key] != new[key]]
    if other:
        raise SystemExit(
            f"{new['task']}: {other[0]} is {new[other[0]]!r} and was {stored[other[0]]!r}: store all methods"
        )
    found = {method["label"]: method for method in new["methods"] if method["label"] in only}
    before = {method["label"]: method for method in stored["methods"]}
    later = {
        "tuned_again": sorted({*stored.get("tuned_again", []), *(found.keys() & before.keys())}),
        "added": sorted({*stored.get("added", []), *(found.keys() - before.keys())}),
    }
    methods = sorted({**before, **found}.values(), key=lambda method: str(method["label"]))
    return {**stored, **later, "methods": methods, "torch": sorted({*stored["torch"], *new["torch"]})}


def measured(name: str) -> dict[str, float]:
    """How heterogeneous the task is, by `consilience diagnose` with seed 0."""
    from consilience.diagnose.diagnosis import diagnose
    from consilience.diagnose.evidence import coordinates

    data = os.environ.get("CONSILIENCE_DATA")
    overrides = [f"data_dir={data}"] if data else []
    return coordinates(diagnose(DOCS.parent / "recipes" / f"tune_{name}.toml", overrides))


def _kept(method: dict[str, Any], tuned: dict[str, Any]) -> dict[str, Any]:
    searched = {key: value for key, value in (tuned["options"] or {}).items() if key in tuned["ranges"]}
    return {
        "label": method["label"],
        "personal": method["personal"],
        "finished": method["finished"],
        "diverged": method["diverged"],
        "objective": tuned["metric"],
        "validation": tuned["best"],
        "options": {key: float(f"{value:.4g}") for key, value in searched.items()},
        "qualities": {key: _rounded(method["qualities"][key]) for key in KEPT if key in method["qualities"]},
        "against": {
            key: _rounded({part: test.get(part) for part in SHOWN})
            for key, test in method["against"].items()
            if key in KEPT
        },
        "simulated_seconds": method["budget"].get("simulated_seconds", {}).get("mean"),
        "megabytes_up": method["budget"].get("megabytes_up", {}).get("mean"),
    }


def _rounded(table: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in table.items()}


def tables() -> str:
    """The tables of the page."""
    return "\n".join(_task(task) for task in results())


def _task(task: dict[str, Any]) -> str:
    seeds = ", ".join(map(str, task["seeds"]))
    again, added = (", ".join(f"`{label}`" for label in task.get(key, [])) for key in ("tuned_again", "added"))
    lines = [
        f"### {task['title'][:1].upper()}{task['title'][1:]}",
        "",
        f"`{task['recipe']}`: {len(task['methods'])} methods, {task['trials']} trials each, then seeds {seeds}; "
        f"{task['rounds']} rounds; PyTorch {', '.join(task['torch'])}; stored {task['stored']}."
        + (f" Tuned again later, with another range of `step`: {again}." if again else "")
        + (f" Added later, paired with `{task['baseline']}` in the same version of PyTorch: {added}." if added else ""),
        "",
        "| method | accuracy | against `fedavg` | clients' own rows | worst tenth | validation | MB up | options |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ordered = sorted(task["methods"], key=lambda method: -method["qualities"].get("accuracy", {}).get("mean", -1.0))
    tests = [method["against"].get("accuracy") or {} for method in ordered]
    holds = survives([test.get("p_t") for test in tests])
    return "\n".join([*lines, *(_line(method, held) for method, held in zip(ordered, holds)), ""])


def _line(method: dict[str, Any], held: bool) -> str:
    star = "*" if method["personal"] else ""
    options = ", ".join(f"{key} {value:.3g}" for key, value in method["options"].items())
    diverged = f" ({method['diverged']} diverged)" if method["diverged"] else ""
    cells = [
        f"`{method['label']}`{diverged}",
        _spread(method, "accuracy"),
        _difference(method["against"].get("accuracy"), held),
        _spread(method, "clients_mean") + star,
        _spread(method, "clients_worst_tenth") + star,
        "—"
        if method["validation"] is None
        else f"{100 * method['validation']:.1f}" + (" (own)" if method["objective"] == "clients_mean" else ""),
        "—" if method["megabytes_up"] is None else f"{method['megabytes_up']:.1f}",
        options or "—",
    ]
    return f"| {' | '.join(cells)} |"


def _spread(method: dict[str, Any], key: str) -> str:
    found = method["qualities"].get(key)
    if found is None:
        return "—"
    deviation = "" if found["deviation"] is None else f" ± {100 * found['deviation']:.1f}"
    return f"{100 * found['mean']:.1f}{deviation}"


def _difference(test: dict[str, Any] | None, held: bool) -> str:
    if test is None or test["mean"] is None:
        return "—"
    number = f"{100 * test['mean']:+.1f}"
    if not test["verdict"].startswith(("larger", "smaller")):
        return number
    return f"**{number}**" if held else f"*{number}*"


def evidence() -> str:
    """What the advice reads: by task, each method's difference from the baseline for both aims."""
    kept = ("task", "title", "trials", "seeds", "baseline", "heterogeneity")
    tasks = [
        {
            **{key: task[key] for key in kept},
            "methods": {m["label"]: _told(m) for m in task["methods"] if _is_advised(m)},
        }
        for task in [*results(), *_untuned()]
    ]
    return json.dumps({"tasks": tasks}, indent=1, sort_keys=True) + "\n"


def _is_advised(method: dict[str, Any]) -> bool:
    """All but the ceiling, which is no federated method."""
    return bool(method["label"] != "centralised")


def _told(method: dict[str, Any]) -> dict[str, Any]:
    """Differences by both aims; one that was tuned for clients' own models is not judged by its global one."""
    aims = ("clients_mean",) if method.get("objective") == "clients_mean" else ("accuracy", "clients_mean")
    tests = {key: method["against"].get(key) for key in aims}
    told: dict[str, Any] = {key: [round(test["mean"], 4), test["verdict"]] for key, test in tests.items() if test}
    seconds = method.get("simulated_seconds")
    return {**told, "simulated_seconds": round(seconds, 1)} if seconds else told


def _untuned() -> list[dict[str, Any]]:
    """Settings that were compared without tuning, and have no tuned counterpart."""
    file = RESULTS / "untuned_heterogeneity.json"
    return json.loads(file.read_text(encoding="utf-8"))["tasks"]  # type: ignore[no-any-return]


def written() -> dict[Path, str]:
    """Every file that is made here, with what it should hold."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return {PAGE: f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.split(END)[1]}", EVIDENCE: evidence()}


def methods_of(name: str) -> list[str]:
    """The methods that a task's recipe lists."""
    text = (DOCS.parent / "recipes" / f"tune_{name}.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["compare"]["methods"]
    return [entry if isinstance(entry, str) else entry["algorithm"] for entry in entries]


def main(arguments: list[str]) -> int:
    """The command."""
    if arguments[:1] == ["--store"]:
        store(Path(arguments[1]), arguments[2:])
    wanted = written()
    if "--check" in arguments:
        return int(any(not file.exists() or file.read_text(encoding="utf-8") != text for file, text in wanted.items()))
    for file, text in wanted.items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
