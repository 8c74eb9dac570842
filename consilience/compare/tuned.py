"""tuned.json, which `consilience tune` writes for a comparison: each method's best options and the trials."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consilience.core import notebook
from consilience.core.metrics import Better
from consilience.core.settings import Invalid, nearest
from consilience.runs import canonical
from consilience.runs.disk import explain, read_file
from consilience.runs.row_log import RecordError

Table = dict[str, Any]

NAME = "tuned.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class TunedTrial:
    """One configuration that was tried."""

    number: int
    state: str  # complete, pruned or failed
    value: float | None  # the validation metric; of a pruned trial the last one it reached
    options: Table


@dataclass(frozen=True, kw_only=True, repr=False)
class TunedMethod:
    """One method's search; `options` are the fixed and the best ones, or None where no trial was completed."""

    label: str
    algorithm: str
    metric: str
    better: Better
    fixed: Table
    settings: Table
    ranges: Table
    options: Table | None
    best: float | None
    trials: tuple[TunedTrial, ...] = ()

    def __repr__(self) -> str:
        best = "no completed trial" if self.best is None else f"{self.metric} {self.best:.4f}"
        return notebook.line(f"TunedMethod({self.label}: {best} after {len(self.trials)} trials)")

    def counted(self, state: str) -> int:
        """The number of trials in this state."""
        return sum(trial.state == state for trial in self.trials)

    def curve(self) -> list[float | None]:
        """The best value after each trial; None before the first completed one."""
        pick, best, found = (max if self.better == "higher" else min), None, list[float | None]()
        for trial in self.trials:
            if trial.state == "complete" and trial.value is not None:
                best = trial.value if best is None else pick(best, trial.value)
            found.append(best)
        return found


@dataclass(frozen=True, kw_only=True, repr=False)
class TuningResult:
    """A study: what was searched, at which budget, and every trial."""

    base: Table  # the run's settings
    compare: Table  # of the file's [compare], without its methods
    trials: int  # the budget of each method
    seeds: tuple[int, ...]
    seed: int
    validation: float
    sampler: str
    pruner: str
    methods: tuple[TunedMethod, ...] = field(default_factory=tuple)

    def __repr__(self) -> str:
        known = [f"{method.label} {method.best:.4f}" for method in self.methods if method.best is not None]
        return notebook.line(f"TuningResult({self.trials} trials each: {', '.join(known) or 'none completed'})")

    def _repr_html_(self) -> str:
        rows = [
            (
                method.label,
                method.metric,
                "none" if method.best is None else f"{method.best:.4f}",
                len(method.trials),
                ", ".join(f"{key} = {value}" for key, value in (method.options or {}).items() if key in method.ranges),
            )
            for method in self.methods
        ]
        head = ("method", "metric", "best on validation rows", "trials", "best options")
        return notebook.table(f"Tuned: {self.budget}", rows, head=head)

    @property
    def budget(self) -> str:
        """The budget of each method, in words."""
        return (
            f"{self.trials} trials of each method ({self.sampler}, pruning: {self.pruner}), validation on "
            f"{self.validation:.0%} of the training rows, {'seeds' if len(self.seeds) > 1 else 'seed'} "
            f"{', '.join(map(str, self.seeds))}"
        )

    def of(self, label: str) -> TunedMethod:
        """A method by its label."""
        known = [method.label for method in self.methods]
        if label not in known:
            raise Invalid(f"{label!r} was not tuned in this study{nearest(label, known)}; tuned: {', '.join(known)}")
        return self.methods[known.index(label)]

    def entries(self, labels: Sequence[str] = ()) -> list[Table]:
        """The methods (all, or those named) with their best options, as entries of a comparison."""
        found = []
        for method in [self.of(label) for label in labels] if labels else self.methods:
            if method.options is None:
                raise Invalid(f"{method.label} has no completed trial: go on with the study, or name the other methods")
            entry: Table = {"algorithm": method.algorithm, "label": method.label}
            found.append(entry | {"options": _spelled(method.options), "settings": method.settings})
        return found


def read(folder: Path) -> TuningResult:
    """The study in a folder."""
    path = folder / NAME
    try:
        table = canonical.decode(read_file(path))
        if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
            raise ValueError("it is no study of this version")
        digest = table.pop("digest", None)  # files of earlier versions have none
        if digest is not None and digest != digest_of(table):
            raise ValueError("its digest is not that of its content")
        methods = [
            TunedMethod(**{**method, "trials": tuple(TunedTrial(**trial) for trial in method["trials"])})
            for method in table.pop("methods")
        ]
        return TuningResult(**{**table, "seeds": tuple(table["seeds"]), "methods": tuple(methods)})
    except FileNotFoundError as problem:
        raise Invalid(f"{folder} holds no {NAME}: make one with `consilience tune`") from problem
    except OSError as problem:
        raise RecordError(explain("read", path, problem)) from problem
    except (ValueError, TypeError, KeyError) as problem:
        raise RecordError(f"{path} is damaged: {problem}") from problem


def digest_of(study: Table) -> str:
    """SHA-256 of a study's content, as stored with it."""
    return hashlib.sha256(canonical.encode(study)).hexdigest()


def is_study(path: Path) -> bool:
    """Whether a folder was written by `tune`."""
    return (path / NAME).is_file()


def _spelled(options: Table) -> Table:
    """Options for a method's entry, where a list means a grid: an option whose value is a list is put in a list."""
    return {key: [value] if isinstance(value, list) else value for key, value in options.items()}
