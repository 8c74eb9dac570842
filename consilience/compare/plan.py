"""The plan of a comparison: each combination of method, grid point and seed is one run (a cell).

All cells share the base run's data, partition, model, environment, rounds, local work and selection; a method brings
its algorithm, the algorithm's own options, and the `settings` of its entry.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilience.compare import tuned
from consilience.compare.methods import Method, read_methods
from consilience.compare.tuned import TuningResult
from consilience.core.capabilities import PoolsData, capability
from consilience.core.settings import Invalid, check_value, nearest, refuse_unknown
from consilience.experiments.config.catalogue import KINDS, has_own_default, section_options
from consilience.experiments.config.config import Config, Seed, from_table
from consilience.options import parts
from consilience.options.recipes import default_part
from consilience.runs import identity, toml_text
from consilience.runs.names import LONGEST, safe_name
from consilience.selection.fixed_for_rounds import FixedForRounds

Table = dict[str, Any]

LOCAL_WORK = (
    *("lr", "momentum", "weight_decay", "lr_decay", "optimiser", "epochs", "batch_size"),
    *("lr_schedule", "lr_schedule_in_round", "clip_norm", "clip_value", "accumulate", "augment", "class_shares"),
)
"""What every method takes from the base run, next to selection and channel."""

_KEYS = ("methods", "seeds", "baseline", "target", "metric", "tuned")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of the comparison."""

    method: str  # its label
    name: str  # of its folder
    config: Config

    @property
    def seed(self) -> int:
        """The run's seed: it draws partition, initial model, selection and batches."""
        return self.config.seed


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All runs to do, checked as far as settings can be."""

    folder: Path
    base: Config
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    baseline: str
    target: float | None
    metric: str
    cells: tuple[Cell, ...]  # seed by seed, so that an unfinished comparison has whole seeds
    tuned: TuningResult | None = None  # the study that tuned the methods' options

    def of(self, label: str) -> list[Cell]:
        """A method's cells."""
        return [cell for cell in self.cells if cell.method == label]


def plan(
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    *,
    algorithms: Sequence[str | Mapping[str, Any]] = (),
    grids: Sequence[str] = (),
    seeds: Sequence[int] = (),
    baseline: str = "",
    target: float | None = None,
    metric: str = "",
    folder: Path | None = None,
) -> Comparison:
    """The comparison of a file (a run's settings, with a [compare] table or none); arguments win over the file.

    In place of a file, the folder of a study gives the run's settings, and the methods with their best options.
    """
    table, spec = read_file(path)
    study = tuned.read(Path(spec["tuned"])) if spec.get("tuned") else None
    base = from_table(table, overrides, source=str(path) if path is not None else "the defaults")
    if study is not None:
        entries = study.entries([str(name) for name in algorithms])
    else:
        entries = list[Any](algorithms) or spec.get("methods", [])
    methods = read_methods(entries, grids)
    usual = [0, 1, 2] if study is None else [n for n in range(5 + len(study.seeds)) if n not in study.seeds][:5]
    chosen = _seeds(list(seeds) or spec.get("seeds", usual))
    _refuse_tuned_seeds(chosen, study)
    by_method = [cells_of(base, method, chosen) for method in methods]
    labels = [method.label for method in methods]
    wanted = target if target is not None else spec.get("target")
    stem = Path(path).stem if path is not None else base.data.name
    return Comparison(
        folder=folder or Path(base.runs) / safe_name(f"compare-{base.name or stem}"[:LONGEST], "name"),
        base=base,
        methods=methods,
        seeds=chosen,
        baseline=_baseline(baseline or spec.get("baseline"), labels),
        target=_target(wanted),
        metric=_metric(metric or spec.get("metric", "")),
        cells=tuple(cell for one_seed in zip(*by_method) for cell in one_seed),
        tuned=study,
    )


def read_file(path: Path | str | None) -> tuple[Table, Table]:
    """The run's settings in a file or in a study's folder, and its [compare] table, checked as far as its keys."""
    if path is not None and tuned.is_study(Path(path)):
        study = tuned.read(Path(path))
        return dict(study.base), {**study.compare, "tuned": str(path)}
    table = toml_text.read(Path(path)) if path is not None else {}
    table.pop("tune", None)  # what `consilience tune` does with this run
    spec = table.pop("compare", {})
    if not isinstance(spec, Mapping):
        raise Invalid(f"compare = {spec!r} must be a table: write [compare] and its settings below it")
    refuse_unknown(spec, _KEYS, "compare")
    if not isinstance(spec.get("tuned", ""), str):
        raise Invalid(f"compare.tuned = {spec['tuned']!r} must be the folder of a study")
    if spec.get("tuned") and spec.get("methods"):
        raise Invalid("compare.tuned and compare.methods are both given: a study brings its methods, leave out one")
    return table, dict(spec)


def _refuse_tuned_seeds(seeds: Sequence[int], study: TuningResult | None) -> None:
    """Refuse seeds that options were tuned on: they would favour the methods with the most tuning."""
    used = [seed for seed in seeds if study is not None and seed in study.seeds]
    if used:
        raise Invalid(f"seed {used[0]} was used to tune these methods: compare them on others, such as --seeds 0-4")


def _seeds(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not given:
        raise Invalid(f"compare.seeds = {given!r} must be a list of whole numbers, such as [0, 1, 2]")
    seeds = tuple(check_value(f"compare.seeds[{i}]", seed, Seed) for i, seed in enumerate(given))
    if len(set(seeds)) < len(seeds):
        raise Invalid(f"compare.seeds = {given!r} names a seed twice, which would count one run as two")
    return seeds


def _baseline(wanted: Any, labels: list[str]) -> str:
    if not wanted:
        return "fedavg" if "fedavg" in labels else labels[0]
    if wanted not in labels:
        raise Invalid(f"baseline = {wanted!r} is not one of {', '.join(labels)}{nearest(wanted, labels)}")
    return str(wanted)


def _target(wanted: Any) -> float | None:
    target = None if wanted is None else float(check_value("compare.target", wanted, float))
    if target is not None and not math.isfinite(target):
        raise Invalid(f"compare.target = {target} must be a finite number, such as 0.9")
    return target


def _metric(wanted: Any) -> str:
    """The metric asked for; whether the task has it is checked before the first run, when the data are known."""
    if not isinstance(wanted, str):
        raise Invalid(f"compare.metric = {wanted!r} must be the key of a metric, such as 'accuracy'")
    return wanted


def cells_of(base: Config, method: Method, seeds: Sequence[int]) -> list[Cell]:
    """The base run's settings with this method's algorithm and options, once for every seed."""
    algorithm = {"name": method.algorithm, **carried(base, method.algorithm), **method.options}
    table = _merged(base.table(), method.settings) | {"algorithm": algorithm}
    try:
        config = from_table(table)
    except Invalid as problem:
        raise Invalid(f"{method.label}: {problem}") from problem
    names = {seed: f"{method.slug}-seed{seed}" for seed in seeds}
    configs = {seed: dataclasses.replace(config, seed=seed, name=name) for seed, name in names.items()}
    return [Cell(method=method.label, name=names[seed], config=configs[seed]) for seed in seeds]


def carried(base: Config, name: str) -> Table:
    """The options that a method takes from the base run's algorithm."""
    options = parts.write(base.algorithm.options)
    if name == base.algorithm.name:
        return _with_selection(options, base)
    known, recipe = section_options("algorithm", name), KINDS["algorithm"].find(name)[1]
    kept = {k: v for k, v in options.items() if k in LOCAL_WORK and k in known and not has_own_default(recipe, k)}
    if "channel" in options and "channel" in known:
        kept["channel"] = options["channel"]
    # a centralised baseline has no selection
    if "selection" in known and capability(default_part(recipe, "selection"), PoolsData) is None:
        kept = _with_selection(kept, base)
    return kept


def _with_selection(options: Table, base: Config) -> Table:
    """The options with the base run's selection set explicitly, since recipes have different default selections."""
    selection = base.algorithm.built.selection
    if capability(selection, PoolsData) is not None:
        return options
    return {
        **options,
        "selection": parts.write(selection.inner if isinstance(selection, FixedForRounds) else selection),
    }


def _merged(table: Table, changes: Mapping[str, Any]) -> Table:
    """The table with changes; a section that is given another name loses the options of the old one."""
    merged = dict(table)
    for key, value in changes.items():
        value = {"name": value} if key in KINDS and isinstance(value, str) else value
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            renamed = "name" in value and value["name"] != old.get("name")
            merged[key] = dict(value) if renamed else _merged(dict(old), value)
        else:
            merged[key] = value
    return merged


def spelled(comparison: Comparison) -> Table:
    """Every cell's settings in plain values, against which a later start of the same comparison is checked."""
    cells = {
        cell.name: {"method": cell.method, "settings": identity.settings(cell.config.table())}
        for cell in comparison.cells
    }
    return {"format": 1, "cells": cells}
