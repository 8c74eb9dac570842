"""The plan of a study: the methods of a file, the ranges of their options, and their common budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from consilience.compare.methods import Method, read_methods
from consilience.compare.plan import cells_of, read_file
from consilience.core.metrics import Better
from consilience.core.settings import Count, Invalid, Range, check, nearest, options_of
from consilience.experiments.config.catalogue import section_options
from consilience.experiments.config.config import Config, Seed, from_table
from consilience.options import parts
from consilience.options.ranges import SearchRange, space
from consilience.runs import toml_text
from consilience.runs.names import LONGEST, safe_name
from consilience.runs.toml_text import TomlTable

Sampler = Literal["tpe", "random"]
Pruner = Literal["median", "halving", "none"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """The [tune] table: the budget, and how it is spent."""

    trials: Count = 20  # of each method
    seeds: tuple[Seed, ...] = (1000,)  # of the runs of a trial
    seed: Seed = 0  # of the sampler
    validation: Annotated[float, Range(above=0, below=1)] = 0.2  # share of each client's training rows
    sampler: Sampler = "tpe"
    pruner: Pruner = "median"
    metric: str = ""  # a key of the comparison's table; the main metric if left out
    metrics: Mapping[str, Any] = field(default_factory=dict)  # of single methods, by label
    ranges: Mapping[str, Any] = field(default_factory=dict)  # of `option` or `recipe.option`

    def __post_init__(self) -> None:
        check(self)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise Invalid(f"tune.seeds = {list(self.seeds)} must name at least one seed, none twice")


@dataclass(frozen=True, kw_only=True)
class MethodStudy:
    """One method's search, in plain values so that it can be sent to another process."""

    folder: Path
    method: Method
    base: str  # the run's settings as TOML, with the share of validation rows
    space: dict[str, SearchRange]
    start: TomlTable  # the first trial: the options as they are without tuning, or the nearest in range
    search: Search
    metric: str
    better: Better = "higher"  # known with the data

    def configs(self, options: Mapping[str, Any]) -> list[Config]:
        """The runs of a trial, one for each seed."""
        tried = dataclasses.replace(self.method, options={**self.method.options, **options})
        base = from_table(toml_text.loads(self.base))
        return [cell.config for cell in cells_of(base, tried, self.search.seeds)]

    def plain(self) -> TomlTable:
        """The values that determine the trials, against which a later start of the same study is checked."""
        search = {key: getattr(self.search, key) for key in ("seeds", "seed", "validation", "sampler", "pruner")}
        return {
            "algorithm": self.method.algorithm,
            "fixed": parts.write(self.method.options),
            "settings": self.method.settings,
            "metric": self.metric,
            "better": self.better,
            "ranges": {key: dataclasses.asdict(found) for key, found in self.space.items()},
            "start": self.start,
            "search": parts.write(search),
        }


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """All searches of a study."""

    folder: Path
    base: Config
    compare: TomlTable  # of the file's [compare], without its methods
    search: Search
    studies: tuple[MethodStudy, ...]


def plan(
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    *,
    algorithms: Sequence[str] = (),
    folder: Path | None = None,
    **search: Any,
) -> Tuning:
    """The study of a file (a run's settings, with [compare] and [tune] tables or none); arguments win over the file."""
    table, spec = read_file(path)
    given = toml_text.read(Path(path)).get("tune", {}) if path is not None else {}
    if not isinstance(given, Mapping):
        raise Invalid(f"tune = {given!r} must be a table: write [tune] and its settings below it")
    wanted = {**given, **{key: value for key, value in search.items() if value not in (None, "", [], ())}}
    read = Search(**parts.read_options("tune", wanted, options_of(Search), "tune"))
    base = from_table(table, overrides, source=str(path) if path is not None else "the defaults")
    _refuse_unfit(base, spec)
    listed = read_methods(spec["methods"], ()) if spec.get("methods") else ()
    methods = _chosen(listed, algorithms)
    labels = {method.label for method in (*listed, *methods)}
    for label in read.metrics:
        if label not in labels:
            raise Invalid(f"tune.metrics.{label}: {label!r} is no method of this study{nearest(label, labels)}")
    evaluation = dataclasses.replace(base.evaluation, validation=read.validation)
    text = dataclasses.replace(base, evaluation=evaluation).toml()
    ranges = _ranges(read.ranges, {method.algorithm for method in (*listed, *methods)})
    stem = Path(path).stem if path is not None else base.data.name
    named = base.name or stem.removeprefix("tune_")
    where = folder or Path(base.runs) / safe_name(f"tune-{named}"[:LONGEST], "name")
    return Tuning(
        folder=where,
        base=base,
        compare={key: value for key, value in spec.items() if key not in ("methods", "tuned")},
        search=read,
        studies=tuple(_study(where, method, text, ranges, read) for method in methods),
    )


def _chosen(listed: Sequence[Method], names: Sequence[str]) -> tuple[Method, ...]:
    """The methods of the file, or those named: by their labels or recipes in the file, else as recipes."""
    if not names:
        return tuple(listed) or read_methods([], ())
    found: list[Method] = []
    for name in names:
        named = [method for method in listed if name in (method.label, method.algorithm)]
        found += named or read_methods([name], ())
    return tuple({method.label: method for method in found}.values())


def _refuse_unfit(base: Config, spec: Mapping[str, Any]) -> None:
    if spec.get("tuned"):
        raise Invalid("compare.tuned is the result of a study: name a file with [[compare.methods]] to tune")
    if base.evaluation.validation is not None:
        raise Invalid("evaluation.validation is set by tune.validation: leave it out")
    if not base.evaluation.every:
        raise Invalid("evaluation.every = 0 tests no model: set at least 1, so that trials can be compared")


def _ranges(given: Mapping[str, Any], recipes: set[str]) -> dict[str, SearchRange]:
    """The ranges of the file: `lr = {low = ..., high = ..., log = true}`, or below a recipe's name."""
    found: dict[str, SearchRange] = {}
    for key, value in given.items():
        if isinstance(value, Mapping) and "low" not in value and "high" not in value:
            if key not in recipes:
                raise Invalid(f"tune.ranges.{key}: {key!r} is no method of this study{nearest(key, recipes)}")
            found |= {
                f"{key}.{option}": _range(f"tune.ranges.{key}.{option}", inner) for option, inner in value.items()
            }
        else:
            found[key] = _range(f"tune.ranges.{key}", value)
    known = {option for recipe in recipes for option in section_options("algorithm", recipe)}
    for key in found:
        if "." not in key and key not in known:
            raise Invalid(f"tune.ranges.{key} is an option of none of the methods{nearest(key, known)}")
    return found


def _range(key: str, value: Any) -> SearchRange:
    if not isinstance(value, Mapping):
        raise Invalid(f"{key} = {value!r} must be a table such as {{low = 0.01, high = 1.0, log = true}}")
    found: SearchRange = parts.made(key, SearchRange, parts.read_options(key, value, options_of(SearchRange), key))
    return found


def _study(where: Path, method: Method, base: str, ranges: Mapping[str, SearchRange], search: Search) -> MethodStudy:
    known = section_options("algorithm", method.algorithm)
    searched = space(method.algorithm, known, method.options, ranges)
    if not searched:
        raise Invalid(f"{method.label} has no option to tune: leave it out, or give tune.ranges.{method.algorithm}")
    needed = {key: _middle(range_) for key, range_ in searched.items() if known[key].required}
    study = MethodStudy(
        folder=where / method.slug,
        method=method,
        base=base,
        space=searched,
        start={},
        search=search,
        metric=str(search.metrics.get(method.label, search.metric)),
    )
    options = study.configs(needed)[0].algorithm.options
    start = {key: _nearest(options.get(key), range_) for key, range_ in searched.items()}
    return dataclasses.replace(study, start=start)


def _middle(range_: SearchRange) -> float:
    low, high = range_.ends
    middle = math.sqrt(low * high) if range_.log else (low + high) / 2
    return round(middle) if range_.whole else middle


def _nearest(value: Any, range_: SearchRange) -> float:
    """The value, moved into its range; the range's middle where it is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _middle(range_)
    low, high = range_.ends
    return min(max(value, low), high)
