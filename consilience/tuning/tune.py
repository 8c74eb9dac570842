"""`cs.tune`: the command `consilience tune` as a function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilience.compare import tuned
from consilience.compare.tuned import TuningResult
from consilience.core.settings import Invalid
from consilience.experiments.config.overrides import file_and_overrides
from consilience.tuning import pages
from consilience.tuning.plan import Tuning, plan
from consilience.tuning.running import Notify, StudyEnd, execute


@dataclass(frozen=True, kw_only=True)
class Tuner:
    """A study that is planned, and can be run."""

    tuning: Tuning

    @staticmethod
    def planned(path: Path | str | None, overrides: Sequence[str], **settings: Any) -> Tuner:
        """The study of a file; see `plan`."""
        return Tuner(tuning=plan(path, overrides, **settings))

    @property
    def in_one_line(self) -> str:
        """The plan in one line."""
        methods, trials = len(self.tuning.studies), self.tuning.search.trials
        return f"{methods} methods x {trials} trials in {self.tuning.folder}"

    def run(self, *, jobs: int, minutes: float | None, notify: Notify) -> tuple[StudyEnd, TuningResult, list[Path]]:
        """Search the rest of the budget, and write the table and the curves."""
        made = execute(self.tuning, jobs=jobs, minutes=minutes, notify=notify)
        found = tuned.read(self.tuning.folder)
        return made, found, [self.tuning.folder / tuned.NAME, *pages.write(found, self.tuning.folder)]


def tune(
    config: Path | str | None = None,
    *overrides: str,
    algorithms: Sequence[str] = (),
    folder: Path | str | None = None,
    jobs: int = 1,
    minutes: float | None = None,
    progress: bool = True,
    **search: Any,
) -> TuningResult:
    """Search the options of several methods with equal budgets; `found.of("fedprox").options` are the best ones.

        found = cs.tune("recipes/quickstart.toml", "rounds=10", algorithms=["fedavg", "fedprox"], trials=10)
        found.of("fedprox").options, found.of("fedprox").best

    config: a run's TOML file, with [compare] and [tune] tables or none; or None for the default run; it may be left
        out before settings.
    overrides: settings for all methods, such as "rounds=50".
    algorithms: recipes by name; by default those in the file's [[compare.methods]].
    folder: where the study is; runs/tune-NAME. What is there already counts.
    jobs: processes that search methods side by side (1); they need a script with `if __name__ == "__main__":`.
    minutes: stop after so many; the same call continues.
    progress: print a line for every trial.
    search: keys of the [tune] table: trials, seeds, seed, validation, sampler, pruner, metric, metrics, ranges.
    """
    if isinstance(algorithms, str):
        raise Invalid(f"algorithms = {algorithms!r} must be a list of names, such as [{algorithms!r}]")
    config, overrides = file_and_overrides(config, overrides)
    where = None if folder is None else Path(folder)
    tuner = Tuner.planned(config, overrides, algorithms=algorithms, folder=where, **search)

    def notify(label: str, number: int, text: str) -> None:
        if progress:
            print(f"{label}, trial {number + 1} of {tuner.tuning.search.trials}: {text}")

    made, found, _ = tuner.run(jobs=jobs, minutes=minutes, notify=notify)
    if made.signal:
        raise KeyboardInterrupt
    return found
