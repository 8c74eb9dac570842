"""Differences between compared runs other than the method: checked before anything runs, then in the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from consilience.compare.plan import LOCAL_WORK, Cell, Comparison
from consilience.compare.results import CellResult
from consilience.core.algorithm import Algorithm
from consilience.runs import identity
from consilience.runs.identity import changed_keys

_THE_METHOD = ("algorithm", "name", "seed", "runs")


def planned_differences(comparison: Comparison) -> list[str]:
    """'simprox: selection: Everyone() -> SlidingWindow(...)' for each setting that differs beside the method.

    Options that were tuned with equal budgets differ by intention.
    """
    searched = set[str]()
    if comparison.tuned is not None:
        searched = {key for method in comparison.tuned.methods for key in method.ranges}
    first = {cell.method: cell for cell in comparison.cells if cell.seed == comparison.seeds[0]}
    base = first[comparison.baseline]
    notes = []
    for method in comparison.methods:
        changes = [*_settings(base, first[method.label]), *_local_work(base, first[method.label], searched)]
        changes += _parts(_algorithm(base), _algorithm(first[method.label]))
        notes += [f"{method.label}: {change}" for change in dict.fromkeys(changes)]
    return notes


def recorded_differences(comparison: Comparison, cells: Sequence[CellResult]) -> list[str]:
    """Differences in the run folders: other selected clients, other data, other code, a model of another size."""
    base = {cell.seed: cell for cell in cells if cell.method == comparison.baseline and cell.trace}
    notes: list[str] = []
    for method in comparison.methods:
        mine = [cell for cell in cells if cell.method == method.label and cell.trace and cell.seed in base]
        for what, words in (("trace", "who took part in which round"), ("parameters", "the number of parameters")):
            others = [cell.seed for cell in mine if getattr(cell, what) != getattr(base[cell.seed], what)]
            notes += [f"{method.label}: {words} differs (seeds {_listed(others)})"] if others else []
        for key in ("data", "partition"):
            others = [cell.seed for cell in mine if cell.prints.get(key) != base[cell.seed].prints.get(key)]
            notes += [f"{method.label}: {key} not the same (seeds {_listed(others)})"] if others else []
    codes = {str(sorted(cell.code.items())) for cell in cells if cell.trace}
    if len(codes) > 1:
        notes.append("the cells were computed by different versions of the code: see `code` in results.json")
    return notes


def _algorithm(cell: Cell) -> Algorithm:
    found: Algorithm = cell.config.algorithm.built
    return found


def _settings(base: Cell, other: Cell) -> list[str]:
    """Sections apart from the algorithm's."""
    mine, theirs = (
        {key: value for key, value in cell.config.table().items() if key not in _THE_METHOD} for cell in (base, other)
    )
    return changed_keys(mine, theirs)


def since_tuning(comparison: Comparison) -> list[str]:
    """Settings of the base run that have changed since its methods were tuned."""
    if comparison.tuned is None:
        return []
    before, now = comparison.tuned.base, identity.settings(comparison.base.table())
    return changed_keys({"rounds": before.get("rounds")}, {"rounds": now["rounds"]}) + identity.differences(
        {**before, "seed": now["seed"]}, now
    )


def _local_work(base: Cell, other: Cell, searched: set[str]) -> list[str]:
    """Differences in local settings that both methods have; an option that one of them lacks is not compared."""
    mine, theirs = base.config.algorithm.options, other.config.algorithm.options
    both = [key for key in LOCAL_WORK if key in mine and key in theirs and key not in searched]
    return changed_keys({key: mine[key] for key in both}, {key: theirs[key] for key in both})


def _parts(base: Algorithm, other: Algorithm) -> list[str]:
    """Differences in selection, channel and number of client passes."""
    pairs: dict[str, tuple[Any, Any]] = {
        "selection": (base.selection, other.selection),
        "channel": (base.channel, other.channel),
        "epochs": (base.client.work.epochs, other.client.work.epochs),
        "batch_size": (base.client.work.batch_size, other.client.work.batch_size),
    }
    return [f"{name}: {one!r} -> {two!r}" for name, (one, two) in pairs.items() if one != two]


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
