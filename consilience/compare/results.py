"""What the cells of a comparison came to: read from their run folders, summed up by method."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from consilience.compare.methods import Method
from consilience.compare.paired import Paired, paired
from consilience.compare.plan import Cell, Comparison
from consilience.runs import canonical
from consilience.runs.folder import RunFolder

QUALITIES = ("accuracy", "best_accuracy", "clients_mean", "clients_worst_tenth", "loss", "absolute_error")
LOWER_IS_BETTER = ("loss", "absolute_error")
BUDGET = ("rounds", "replies", "client_epochs", "megabytes_up", "megabytes_down", "simulated_seconds", "wall_seconds")
TO_TARGET = ("target_rounds", "target_megabytes", "target_seconds")


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """One run: how good the model got, and what it cost."""

    method: str
    seed: int
    status: str  # finished, diverged, or what else its folder says; "missing" without one
    qualities: dict[str, float] = field(default_factory=dict)
    personal: bool = False  # clients were judged by models of their own
    budget: dict[str, float] = field(default_factory=dict)
    to_target: dict[str, float] | None = None  # None: never reached
    trace: str = ""  # digest of who took part when
    prints: dict[str, Any] = field(default_factory=dict)
    code: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and standard deviation over seeds."""

    n: int
    mean: float
    deviation: float | None  # None: one seed

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None of nothing."""
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


def collect(comparison: Comparison) -> tuple[list[CellResult], list[MethodResult]]:
    """All cells, and every method with its paired tests."""
    cells = [read_cell(comparison.folder / cell.name, cell, comparison.target) for cell in comparison.cells]
    by_method = {m.label: [cell for cell in cells if cell.method == m.label] for m in comparison.methods}
    base = by_method[comparison.baseline]
    methods = []
    for method in comparison.methods:
        against = {} if method.label == comparison.baseline else _against(by_method[method.label], base)
        methods.append(_summed(method, by_method[method.label], against))
    return cells, methods


def read_cell(path: Path, cell: Cell, target: float | None) -> CellResult:
    """One run folder, as far as it got; only finished runs have numbers."""
    if not (path / "run.json").exists():
        return CellResult(method=cell.method, seed=cell.seed, status="missing")
    folder = RunFolder.open(path)
    facts = folder.facts()
    known: dict[str, Any] = {"method": cell.method, "seed": cell.seed, "status": str(facts.get("status", "unknown"))}
    known |= {"prints": facts.get("prints", {}), "code": facts.get("code", {})}
    known |= {"parameters": int(facts.get("parameters", 0))}
    rows = folder.rows().rows
    if known["status"] != "finished" or not rows:
        return CellResult(**known)
    seconds = sum(row["seconds"] + row["evaluation_seconds"] for row in folder.timing.read().rows)
    algorithm = cell.config.algorithm.built
    return CellResult(
        **known,
        qualities=qualities(rows),
        personal=any(row.get("personal_accuracy_mean") is not None for row in rows),
        budget=_budget(rows, algorithm.client.work.epochs, seconds),
        to_target=to_target(rows, target),
        trace=hashlib.sha256(canonical.encode([row["cohort"] for row in rows])).hexdigest(),
    )


def qualities(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Last tested values, and the best accuracy; clients are judged by their own models where they have any."""
    accuracies = _known(rows, "accuracy")
    found = {
        "accuracy": accuracies[-1:],
        "best_accuracy": [max(accuracies)] if accuracies else [],
        "clients_mean": (_known(rows, "personal_accuracy_mean") or _known(rows, "client_accuracy_mean"))[-1:],
        "clients_worst_tenth": (
            _known(rows, "personal_accuracy_worst_tenth") or _known(rows, "client_accuracy_worst_tenth")
        )[-1:],
        "loss": _known(rows, "loss")[-1:],
        "absolute_error": _known(rows, "absolute_error")[-1:],
    }
    return {key: float(values[0]) for key, values in found.items() if values}


def to_target(rows: Sequence[dict[str, Any]], target: float | None) -> dict[str, float] | None:
    """Rounds, megabytes both ways and simulated seconds until the global model first tests at `target` or above."""
    if target is None:
        return None
    for row in rows:
        if row.get("accuracy") is not None and row["accuracy"] >= target:
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
        "client_epochs": replies * epochs,  # as planned: an environment may cut work short
        "megabytes_up": rows[-1]["bytes_up_total"] / 1e6,
        "megabytes_down": rows[-1]["bytes_down_total"] / 1e6,
        "simulated_seconds": rows[-1]["simulated_seconds"],
        "wall_seconds": seconds,
    }


def _known(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _against(cells: Sequence[CellResult], base: Sequence[CellResult]) -> dict[str, Paired]:
    """The paired tests of every quality that both methods have."""
    theirs = {cell.seed: cell.qualities for cell in base}
    found = {}
    for key in QUALITIES:
        pairs = [
            (cell.qualities[key], theirs[cell.seed][key])
            for cell in cells
            if key in cell.qualities and key in theirs.get(cell.seed, {})
        ]
        if pairs:
            found[key] = paired([mine for mine, _ in pairs], [other for _, other in pairs])
    return found


def _summed(method: Method, cells: Sequence[CellResult], against: dict[str, Paired]) -> MethodResult:
    done = [cell for cell in cells if cell.qualities or cell.budget]
    reached = [cell.to_target for cell in done if cell.to_target is not None]
    diverged = sum(cell.status == "diverged" for cell in cells)
    return MethodResult(
        method=method,
        finished=len(done),
        diverged=diverged,
        missing=len(cells) - len(done) - diverged,
        personal=any(cell.personal for cell in done),
        qualities=_spreads([cell.qualities for cell in done], QUALITIES),
        budget=_spreads([cell.budget for cell in done], BUDGET),
        reached=len(reached),
        to_target=_spreads(reached, TO_TARGET),
        against=against,
    )


def _spreads(found: Sequence[dict[str, float]], keys: Sequence[str]) -> dict[str, Spread]:
    spreads = {key: Spread.of([one[key] for one in found if key in one]) for key in keys}
    return {key: spread for key, spread in spreads.items() if spread is not None}


def plain_results(comparison: Comparison, cells: Sequence[CellResult], methods: Sequence[MethodResult]) -> Any:
    """Everything in JSON's own types."""
    table = {
        "baseline": comparison.baseline,
        "target": comparison.target,
        "seeds": list(comparison.seeds),
        "methods": [_plain_method(found) for found in methods],
        "cells": [asdict(cell) for cell in cells],
    }
    return canonical.to_json_types(table, "results", nonfinite_as_null=True)


def _plain_method(found: MethodResult) -> dict[str, Any]:
    table = {**asdict(found), "label": found.method.label, "algorithm": found.method.algorithm}
    table["method"] = {"options": found.method.options, "settings": found.method.settings}
    for key, test in found.against.items():
        table["against"][key]["verdict"] = test.verdict
    return table


def main_quality(comparison: Comparison, methods: Sequence[MethodResult]) -> str:
    """What the tests in the table are about: what was asked for, else accuracy, else the error of a regression."""
    if comparison.metric:
        return comparison.metric
    known = {key for found in methods for key in found.qualities}
    return next((key for key in ("accuracy", "absolute_error") if key in known), "loss")
