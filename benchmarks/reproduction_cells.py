"""The reproduction plan: experiments, their cells (method x seed), stored rows, and the order of the runs.

`docs/results/experiments.toml` lists the experiments; `docs/results/<experiment>.json` has a row for every cell that
was run. A row counts for a cell while the settings given for it (recipe, settings of the experiment, method) are the
same: their digest is in the row.
"""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilience.compare.plan import Cell as ComparisonCell
from consilience.compare.plan import plan
from consilience.runs import canonical, toml_text
from consilience.runs.disk import replace_file
from consilience.runs.folder import RunFolder

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
KEYS = ("accuracy", "loss", "f1", "precision", "recall", "client_accuracy_mean", "client_accuracy_worst_tenth")
KEYS += ("personal_accuracy_mean", "local_accuracy_mean")
"""What is kept of every test, where a run has it; `local_` is the clients' models before they are merged."""

_NOT_RESULTS = ("name", "compare", "runs", "checkpoint", "evaluation", "log", "data_dir", "threads")
_EVERY_RUN = ("threads=1", "engine.compile=false")  # with these a repeated cell gives the same bits

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A comparison of methods over seeds that decides one claim or several."""

    name: str
    recipe: str
    set: tuple[str, ...] = ()
    seeds: tuple[int, ...]
    device: str  # "cuda" or "cpu"
    seconds: float  # of one cell, beside the others that run at the same time
    worth: float = 1.0  # how much earlier than its cost says
    data: tuple[str, ...] = ()  # folders below the data directory
    methods: tuple[str, ...] = ()  # of the recipe's, by label; all unless given


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: a method with a seed."""

    experiment: Experiment
    method: str
    seed: int
    digest: str
    seconds: float  # what is expected of it
    run: ComparisonCell

    @property
    def key(self) -> tuple[str, str, int]:
        """What no other cell has."""
        return self.experiment.name, self.method, self.seed

    def folder(self, work: Path, source: str) -> Path:
        """Where it runs; other settings or other code, another folder."""
        return work / self.experiment.name / f"{self.run.name}-{self.digest[:8]}-{source[:8]}"

    def seconds_left(self, folder: Path) -> float:
        """What is expected of the rest of it."""
        path = folder / "metrics.jsonl"
        done = len(path.read_bytes().splitlines()) if path.exists() else 0
        return self.seconds * max(0.0, 1 - done / self.run.config.rounds)


def read_experiments(path: Path = RESULTS / "experiments.toml") -> tuple[Experiment, ...]:
    """The experiments of a file, in its order."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["experiment"]
    lists = ("set", "seeds", "data", "methods")
    made = [Experiment(**{k: tuple(v) if k in lists else v for k, v in table.items()}) for table in tables]
    names = [one.name for one in made]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SystemExit(f"{path}: two experiments are called {twice[0]}: give each its own name")
    return tuple(made)


def cells_of(experiment: Experiment, rows: Sequence[Row], data: str | None = None) -> list[Cell]:
    """All cells, seed by seed; `rows` are what is stored of this experiment and tell how long they take."""
    overrides = [*experiment.set, *_EVERY_RUN, f"engine.device={experiment.device}"]
    overrides += [f"data_dir={data}"] if data else []
    comparison = plan(ROOT / experiment.recipe, overrides, seeds=list(experiment.seeds))
    given = {k: v for k, v in toml_text.read(ROOT / experiment.recipe).items() if k not in _NOT_RESULTS}
    methods = {
        method.label: _digest([given, sorted(experiment.set), method.algorithm, method.options, method.settings])
        for method in comparison.methods
    }
    took = {
        label: [row["seconds"] * row["planned"] / row["rounds"] for row in rows if _timed(row, label, experiment)]
        for label in methods
    }
    return [
        Cell(
            experiment=experiment,
            method=cell.method,
            seed=cell.seed,
            digest=methods[cell.method],
            seconds=statistics.median(took[cell.method]) if took[cell.method] else experiment.seconds,
            run=cell,
        )
        for cell in comparison.cells
        if not experiment.methods or cell.method in experiment.methods
    ]


def _timed(row: Row, label: str, experiment: Experiment) -> bool:
    known = row["method"] == label and bool(row.get("seconds")) and row["rounds"] > 0
    return known and row["device"].startswith(experiment.device)


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical.encode(canonical.to_json_types(value, "settings"))).hexdigest()[:16]


def stored(folders: Iterable[Path], name: str) -> list[Row]:
    """The rows of an experiment in some folders; a finished one replaces one that was cut short."""
    found: dict[tuple[Any, ...], Row] = {}
    for folder in folders:
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            key = row["method"], row["seed"], row.get("digest", "")
            if key not in found or row["rounds"] >= found[key]["rounds"]:
                found[key] = row
    return sorted(found.values(), key=lambda row: (row["method"], str(row["seed"]), row.get("digest", "")))


def store(folder: Path, name: str, rows: Sequence[Row]) -> None:
    """Add rows to an experiment's file, all of them or, if the disk fails, none."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"experiment": name, "rows": []}
    keys = {(row["method"], row["seed"], row.get("digest", "")) for row in rows}
    kept = [row for row in before["rows"] if (row["method"], row["seed"], row.get("digest", "")) not in keys]
    merged = sorted([*kept, *rows], key=lambda row: (row["method"], str(row["seed"]), row.get("digest", "")))
    lines = ",\n  ".join(json.dumps(row, sort_keys=True) for row in merged)
    head = json.dumps({key: value for key, value in before.items() if key != "rows"}, sort_keys=True)[1:-1]
    replace_file(path, f'{{{head}, "rows": [\n  {lines}\n]}}\n'.encode())


def row_of(cell: Cell, folder: Path, facts: Mapping[str, str]) -> Row | None:
    """What is stored of a cell that was run, as far as it got; None before its first test."""
    run = RunFolder.open(folder)
    status, tests = str(run.facts().get("status", "")), []
    rows = run.rows().rows
    for row in rows:
        values = {key: row[key] for key in KEYS if row.get(key) is not None}
        if "loss" in values:
            tests.append({"round": row["round"], **values})
    if not tests and status != "diverged":
        return None
    weights = folder / "model.safetensors"
    return {
        "method": cell.method,
        "seed": cell.seed,
        "digest": cell.digest,
        "status": status if status in ("finished", "diverged") else "cut short",
        "rounds": rows[-1]["round"] if rows else 0,
        "planned": cell.run.config.rounds,
        "tests": tests,
        "final": tests[-1].get("accuracy", tests[-1]["loss"]) if tests else None,
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest()[:16] if weights.exists() else "",
        "seconds": round(sum(row["seconds"] + row["evaluation_seconds"] for row in run.timing.read().rows), 1),
        **facts,
    }


def missing(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Cell]:
    """Cells of which no whole run is stored, or only one from before a measure that a claim reads was stored."""
    whole = {(row["method"], row["seed"], row.get("digest")): row for row in rows if row["status"] != "cut short"}
    read = measures_read()

    def complete(cell: Cell) -> bool:
        row = whole.get((cell.method, cell.seed, cell.digest))
        return row is not None and (not row["tests"] or read.get(cell.key[:2], set()) <= row["tests"][-1].keys())

    return [cell for cell in cells if not complete(cell)]


def claimed(path: Path = RESULTS / "claims.toml") -> dict[str, list[frozenset[str]]]:
    """The methods whose rows decide a claim, claim by claim, for every experiment."""
    found: dict[str, list[frozenset[str]]] = {}
    for claim in _claims(path):
        found.setdefault(claim["experiment"], []).append(_methods(claim))
    return found


def measures_read(path: Path = RESULTS / "claims.toml") -> dict[tuple[str, str], set[str]]:
    """What claims read of the tests of an experiment's method, where a run may have been stored without it."""
    found: dict[tuple[str, str], set[str]] = {}
    for claim in _claims(path):
        key = "f1" if claim.get("measure") == "f1_gap" else claim.get("measure")
        if key in KEYS:
            for method in _methods(claim):
                found.setdefault((claim["experiment"], method), set()).add(key)
    return found


@functools.cache
def _claims(path: Path) -> tuple[dict[str, Any], ...]:
    """The claims that stored rows decide."""
    every = tomllib.loads(path.read_text(encoding="utf-8"))["claim"]
    return tuple(claim for claim in every if "experiment" in claim)


def _methods(claim: Mapping[str, Any]) -> frozenset[str]:
    others = claim.get("baseline", [])
    return frozenset([claim["method"], *([others] if isinstance(others, str) else others)])


def ordered(experiments: Mapping[str, tuple[Sequence[Cell], Sequence[Row]]]) -> list[Cell]:
    """All missing cells, cheap and decisive first.

    A block is what one claim still needs of one seed. Its place is its cost times the number of seeds that there will
    be with it, over the experiment's worth: a second seed of something cheap comes before the first of something ten
    times as dear, and no experiment gets all its seeds before the others have one. What no claim needs comes last.
    """
    claims = claimed()
    blocks: list[tuple[bool, float, list[Cell]]] = []
    for name, (cells, rows) in experiments.items():
        todo = missing(cells, rows)
        for number, seed in enumerate(dict.fromkeys(cell.seed for cell in cells), start=1):
            here = [cell for cell in todo if cell.seed == seed]
            needed = [[cell for cell in here if cell.method in methods] for methods in claims.get(name, [])]
            others = [cell for cell in here if not any(cell in block for block in needed)]
            for block in (*needed, others):
                if block:
                    cost = sum(cell.seconds for cell in block) * number / block[0].experiment.worth
                    blocks.append((block is others, cost, block))
    in_order = [cell for _, _, block in sorted(blocks, key=lambda one: one[:2]) for cell in block]
    return list({cell.key: cell for cell in in_order}.values())
