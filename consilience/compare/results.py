"""The results of a comparison: read from the cells' run folders, summarised by method."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from consilience.compare.methods import Method
from consilience.compare.paired import Paired, paired
from consilience.compare.plan import Cell, Comparison
from consilience.core.metrics import SHARE, Better, MetricRow
from consilience.core.settings import Invalid, nearest
from consilience.runs import canonical, identity, metric_table
from consilience.runs.folder import RecordError, RunFolder
from consilience.runs.identity import changed_keys
from consilience.runs.metric_table import by_importance, main_of, merged

BUDGET = ("rounds", "replies", "client_epochs", "megabytes_up", "megabytes_down", "simulated_seconds", "wall_seconds")
CELL = ("seed", "rounds", "data", "partition", "model", "algorithm")  # settings that a cell's folder must have
TO_TARGET = ("target_rounds", "target_megabytes", "target_seconds")


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A number by which methods are compared, and how it is shown."""

    key: str
    title: str
    unit: str = ""
    better: Better = "higher"
    of_clients: bool = False
    brief: bool = True  # in the table for people; all are in the files


def qualities_of(metrics: Sequence[MetricRow]) -> tuple[Quality, ...]:
    """The main metric at the end and at its best, that of the clients, and the other metrics."""
    main, ranked = main_of(metrics), by_importance(metrics)
    own = [
        Quality(key=row.key, title=row.title, unit=row.unit, better=row.better, brief=not row.detail) for row in ranked
    ]
    shown: dict[str, Any] = {"unit": main.unit, "better": main.better}
    derived = [
        Quality(key=f"best_{main.key}", title="best", **shown),
        Quality(key="clients_mean", title="clients: mean", of_clients=True, **shown),
        Quality(key="clients_worst_tenth", title="worst tenth", of_clients=True, **shown),
    ]
    rest = [replace(one, brief=one.brief and (main.key == "loss" or one.key != "loss")) for one in own[1:]]
    return (own[0], *derived, *rest)


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """One run: the quality of its model, and its cost."""

    method: str
    seed: int
    status: str  # finished, diverged, or another status of its folder; "missing" without a folder
    qualities: dict[str, float] = field(default_factory=dict)
    personal: bool = False  # clients were tested with personal models
    budget: dict[str, float] = field(default_factory=dict)
    to_target: dict[str, float] | None = None  # None: never reached
    trace: str = ""  # digest of the selected clients of all rounds
    prints: dict[str, Any] = field(default_factory=dict)
    code: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    metrics: tuple[MetricRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and standard deviation over seeds."""

    n: int
    mean: float
    deviation: float | None  # None: one seed

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """The spread of these values; None for no values."""
        numbers = np.asarray(values, dtype=np.float64)
        if not len(numbers):
            return None
        return Spread(
            n=len(numbers),
            mean=float(numbers.mean()),
            deviation=float(numbers.std(ddof=1)) if len(numbers) > 1 else None,
        )


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """A method over its finished seeds."""

    method: Method
    finished: int
    diverged: int
    missing: int
    personal: bool
    qualities: dict[str, Spread]
    budget: dict[str, Spread]
    reached: int  # seeds that reached the target
    to_target: dict[str, Spread]
    against: dict[str, Paired]  # by quality; empty for the baseline


@dataclass(frozen=True, kw_only=True)
class Results:
    """All cells, every method with its paired tests, and the compared metrics."""

    cells: tuple[CellResult, ...]
    methods: tuple[MethodResult, ...]
    qualities: tuple[Quality, ...]
    main: Quality  # the metric of the tests in the table


def collect(comparison: Comparison) -> Results:
    """Read the run folders as they are now."""
    cells = tuple(read_cell(comparison.folder / cell.name, cell, comparison.target) for cell in comparison.cells)
    metrics = merged(cell.metrics for cell in cells)
    qualities = qualities_of(metrics or metric_table.read({}, []))
    main = main_quality(comparison, qualities) if metrics else qualities[0]
    by_method = {m.label: [cell for cell in cells if cell.method == m.label] for m in comparison.methods}
    base = by_method[comparison.baseline]
    methods = []
    for method in comparison.methods:
        against = {} if method.label == comparison.baseline else _against(by_method[method.label], base, qualities)
        methods.append(_summed(method, by_method[method.label], against, qualities))
    return Results(cells=cells, methods=tuple(methods), qualities=qualities, main=main)


def read_cell(path: Path, cell: Cell, target: float | None) -> CellResult:
    """One run folder, as far as it got; only finished runs have numbers."""
    if not (path / "run.json").exists():
        return CellResult(method=cell.method, seed=cell.seed, status="missing")
    folder = RunFolder.open(path)
    facts = folder.facts()
    _refuse_another_cell(folder, facts, cell)
    known: dict[str, Any] = {"method": cell.method, "seed": cell.seed, "status": str(facts.get("status", "unknown"))}
    known |= {"prints": facts.get("prints", {}), "code": facts.get("code", {})}
    known |= {"parameters": int(facts.get("parameters", 0))}
    rows = folder.rows().rows
    metrics = metric_table.read(facts, rows)
    known |= {"metrics": metrics}
    if known["status"] != "finished" or not rows:
        return CellResult(**known)
    seconds = sum(row["seconds"] + row["evaluation_seconds"] for row in folder.timing.read().rows)
    algorithm = cell.config.algorithm.built
    return CellResult(
        **known,
        qualities=qualities(rows, metrics),
        personal=any(row.get(f"personal_{main_of(metrics).key}_mean") is not None for row in rows),
        budget=_budget(rows, algorithm.client.work.epochs, seconds),
        to_target=to_target(rows, target, main_of(metrics)),
        trace=hashlib.sha256(canonical.encode([row["cohort"] for row in rows])).hexdigest(),
    )


def _refuse_another_cell(folder: RunFolder, facts: Mapping[str, Any], cell: Cell) -> None:
    """Refuse the folder of another method, seed or setting in a cell's place."""
    stored, wanted = facts.get("config", {}), identity.settings(cell.config.table())
    before = {"method": facts.get("comparison", {}).get("method", cell.method)}
    before |= {key: stored[key] for key in CELL if key in stored}
    now = {"method": cell.method} | {key: wanted.get(key) for key in CELL if key in stored}
    found = changed_keys(before, now)
    if found:
        raise RecordError(
            f"{folder.path} does not hold the run of {cell.method} with seed {cell.seed} ({', '.join(found[:3])}): put "
            "the folder back, or remove it, and it is run again"
        )


def qualities(rows: Sequence[dict[str, Any]], metrics: Sequence[MetricRow]) -> dict[str, float]:
    """The last tested values, and the best one; clients are tested with their personal models if they have any."""
    main = main_of(metrics)
    values = _known(rows, main.key)
    found = {row.key: _known(rows, row.key)[-1:] for row in metrics}
    found[f"best_{main.key}"] = [max(values) if main.better == "higher" else min(values)] if values else []
    for name in ("mean", "worst_tenth"):
        own, shared = (_known(rows, f"{whose}_{main.key}_{name}") for whose in ("personal", "client"))
        found[f"clients_{name}"] = (own or shared)[-1:]
    return {key: float(values[0]) for key, values in found.items() if values}


def to_target(rows: Sequence[dict[str, Any]], target: float | None, main: MetricRow) -> dict[str, float] | None:
    """Rounds, megabytes both ways and simulated seconds until the global model first tests at `target` or better."""
    if target is None:
        return None
    for row in rows:
        value = row.get(main.key)
        if value is not None and (value >= target if main.better == "higher" else value <= target):
            sent = row["bytes_up_total"] + row["bytes_down_total"]
            return {
                "target_rounds": row["round"],
                "target_megabytes": sent / 1e6,
                "target_seconds": row["simulated_seconds"],
            }
    return None


def _budget(rows: Sequence[dict[str, Any]], epochs: float, seconds: float) -> dict[str, float]:
    replies = sum(len(row["cohort"]) for row in rows)
    return {
        "rounds": rows[-1]["round"],
        "replies": replies,
        "client_epochs": replies * epochs,  # as planned: an environment may interrupt local work
        "megabytes_up": rows[-1]["bytes_up_total"] / 1e6,
        "megabytes_down": rows[-1]["bytes_down_total"] / 1e6,
        "simulated_seconds": rows[-1]["simulated_seconds"],
        "wall_seconds": seconds,
    }


def _known(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _against(
    cells: Sequence[CellResult], base: Sequence[CellResult], qualities: Sequence[Quality]
) -> dict[str, Paired]:
    """The paired tests of every quality that both methods have."""
    theirs = {cell.seed: cell.qualities for cell in base}
    found = {}
    for key in (quality.key for quality in qualities):
        pairs = [
            (cell.qualities[key], theirs[cell.seed][key])
            for cell in cells
            if key in cell.qualities and key in theirs.get(cell.seed, {})
        ]
        if pairs:
            found[key] = paired([mine for mine, _ in pairs], [other for _, other in pairs])
    return found


def _summed(
    method: Method, cells: Sequence[CellResult], against: dict[str, Paired], qualities: Sequence[Quality]
) -> MethodResult:
    done = [cell for cell in cells if cell.qualities or cell.budget]
    reached = [cell.to_target for cell in done if cell.to_target is not None]
    diverged = sum(cell.status == "diverged" for cell in cells)
    return MethodResult(
        method=method,
        finished=len(done),
        diverged=diverged,
        missing=len(cells) - len(done) - diverged,
        personal=any(cell.personal for cell in done),
        qualities=_spreads([cell.qualities for cell in done], [q.key for q in qualities]),
        budget=_spreads([cell.budget for cell in done], BUDGET),
        reached=len(reached),
        to_target=_spreads(reached, TO_TARGET),
        against=against,
    )


def _spreads(found: Sequence[dict[str, float]], keys: Sequence[str]) -> dict[str, Spread]:
    spreads = {key: Spread.of([one[key] for one in found if key in one]) for key in keys}
    return {key: spread for key, spread in spreads.items() if spread is not None}


def plain_results(comparison: Comparison, found: Results) -> Any:
    """Everything in JSON's own types."""
    table: dict[str, Any] = {
        "baseline": comparison.baseline,
        "target": comparison.target,
        "seeds": list(comparison.seeds),
        "metrics": metric_table.stored(merged(cell.metrics for cell in found.cells)),
        "methods": [_plain_method(method) for method in found.methods],
        "cells": [{k: v for k, v in asdict(cell).items() if k != "metrics"} for cell in found.cells],
    }
    if comparison.tuned is not None:
        table["tuned"] = asdict(comparison.tuned)
    return canonical.to_json_types(table, "results", nonfinite_as_null=True)


def _plain_method(found: MethodResult) -> dict[str, Any]:
    table = {**asdict(found), "label": found.method.label, "algorithm": found.method.algorithm}
    table["method"] = {"options": found.method.options, "settings": found.method.settings}
    for key, test in found.against.items():
        table["against"][key]["verdict"] = test.verdict
    return table


def main_quality(comparison: Comparison, qualities: Sequence[Quality]) -> Quality:
    """The metric of the tests in the table: the one asked for, else the main metric."""
    named = {quality.key: quality for quality in qualities}
    if comparison.metric and comparison.metric not in named:
        wanted = comparison.metric
        raise Invalid(f"metric = {wanted!r} is not one of {', '.join(named)}{nearest(wanted, named)}")
    return named[comparison.metric] if comparison.metric else qualities[0]


def refuse_questions(comparison: Comparison, metrics: Sequence[MetricRow]) -> None:
    """Refuse a metric that the runs do not have, or a target outside the range of the main metric."""
    main_quality(comparison, qualities_of(metrics))
    main, target = main_of(metrics), comparison.target
    if target is not None and main.unit == SHARE and not 0 < target <= 1:
        raise Invalid(f"compare.target = {target:g} is no {main.title}: it must be above 0 and at most 1")
