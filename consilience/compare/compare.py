"""`cs.compare`: the command `consilience compare` as a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from consilience.compare import pages, results, running
from consilience.compare.plan import Comparison, plan
from consilience.compare.results import MethodResult, Results
from consilience.core import notebook
from consilience.core.algorithm import Algorithm
from consilience.core.settings import Invalid, nearest
from consilience.experiments.config.overrides import file_and_overrides


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class ComparisonResult:
    """The result of a comparison: every method over its seeds, tested against the baseline."""

    comparison: Comparison
    results: Results
    files: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        """Where the runs, the tables and comparison.html are."""
        return self.comparison.folder

    def of(self, label: str) -> MethodResult:
        """One method: `found.of("fedprox").qualities["accuracy"].mean`, `.against["accuracy"].verdict`."""
        known = {method.method.label: method for method in self.results.methods}
        if label not in known:
            raise Invalid(f"{label!r} was not compared{nearest(label, known)}; there are {', '.join(known)}")
        return known[label]

    def table(self) -> dict[str, Any]:
        """Every number in plain values, as in results.json."""
        return results.plain_results(self.comparison, self.results)

    def rows(self) -> list[dict[str, Any]]:
        """One row per method: mean and standard deviation of each metric, and the test against the baseline."""
        main = self.results.main.key
        found = []
        for method in self.results.methods:
            row: dict[str, Any] = {"method": method.method.label, "seeds": method.finished}
            for key, spread in method.qualities.items():
                row |= {key: spread.mean, f"{key}_deviation": spread.deviation}
            test = method.against.get(main)
            row |= {"difference": None if test is None else test.mean, "verdict": "" if test is None else test.verdict}
            found.append(row)
        return found

    def frame(self) -> Any:
        """The rows as a pandas frame."""
        try:
            import pandas
        except ImportError as problem:
            raise ImportError('found.frame() needs pandas: pip install "consilience[frames]"') from problem
        return pandas.DataFrame(self.rows()).set_index("method")

    def __repr__(self) -> str:
        main = self.results.main
        ranked = [(m.method.label, m.qualities[main.key].mean) for m in self.results.methods if main.key in m.qualities]
        ranked.sort(key=lambda item: item[1] if main.better == "lower" else -item[1])
        said = ", ".join(f"{label} {value:.4f}" for label, value in ranked)
        return notebook.line(f"ComparisonResult({main.title}: {said or 'no finished run'})")

    def _repr_html_(self) -> str:
        main = self.results.main.key
        rows = [
            (row["method"], row["seeds"], _shown(row.get(main)), _shown(row.get(f"{main}_deviation")), row["verdict"])
            for row in self.rows()
        ]
        head = ("method", "seeds", self.results.main.title, "deviation", f"against {self.comparison.baseline}")
        return notebook.table(f"Comparison in {self.folder}", rows, head=head)


def compare(
    algorithms: Sequence[str | Mapping[str, Any]] = (),
    config: Path | str | None = None,
    *overrides: str,
    grids: Sequence[str] = (),
    seeds: Sequence[int] = (),
    baseline: str = "",
    target: float | None = None,
    metric: str = "",
    folder: Path | str | None = None,
    jobs: int = 1,
    together: int = 1,
    progress: bool = True,
) -> ComparisonResult:
    """Run several methods on the same federation over several seeds, and test which are better; `consilience compare`.

        found = cs.compare(["fedavg", "simprox"], "rounds=10", seeds=[0, 1, 2])
        found.frame()[["accuracy", "verdict"]]

    algorithms: recipes by name, or tables such as {"algorithm": "fedprox", "label": "strong", "options": {"mu": 1.0}};
        by default those in the file's [[compare.methods]].
    config: a run's TOML file, the folder of `cs.tune`, or None for the default run; it may be left out before settings.
    overrides: settings for all methods, such as "rounds=50".
    grids: options to try, such as "fedprox.mu=[0.01, 0.1]".
    seeds: of the runs (0, 1, 2); each draws partition, initial model and selection.
    baseline, target, metric: as for the command.
    folder: where the runs are, runs/compare-NAME; finished runs that are there are not run again.
    jobs, together: processes, or runs whose clients train in one vectorised group.
    progress: show what is running.
    """
    if isinstance(algorithms, (str, Path)):
        raise Invalid(f"algorithms = {str(algorithms)!r} must be a list of names, such as ['fedavg', 'simprox']")
    for given in algorithms:
        if isinstance(given, Algorithm) or callable(given):
            raise Invalid(
                "algorithms are given by name, so that their runs can be repeated: write 'fedprox', or "
                "{'algorithm': 'fedprox', 'options': {'mu': 0.1}}"
            )
    config, overrides = file_and_overrides(config, overrides)
    comparison = plan(
        config,
        overrides,
        algorithms=algorithms,
        grids=grids,
        seeds=seeds,
        baseline=baseline,
        target=target,
        metric=metric,
        folder=None if folder is None else Path(folder),
    )
    ended = running.execute(comparison, jobs=jobs, console=Console(stderr=True, quiet=not progress), together=together)
    written = pages.write(comparison)
    if any(found.signal for found in ended.values()):
        raise KeyboardInterrupt
    for name, found in ended.items():
        if found.status == "failed":
            raise RuntimeError(f"{name}: {found.text}; the finished runs are in {comparison.folder}")
    return ComparisonResult(comparison=comparison, results=results.collect(comparison), files=written.files)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
