"""The command `consilience tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from consilience.runs.failures import UNEXPECTED, guarded


def tune(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="A run's TOML file, with [compare] and [tune] tables or none; settings for all methods.",
            show_default=False,
        ),
    ] = None,
    algorithms: Annotated[str, typer.Option(help="Methods, with commas between: fedavg,fedprox,simprox.")] = "",
    trials: Annotated[int | None, typer.Option(min=1, help="Trials of each method; 20.", show_default=False)] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the runs of a trial, with commas between; 1000.")] = "",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampler; 0.", show_default=False)] = None,
    validation: Annotated[
        float | None, typer.Option(help="Share of each client's training rows to judge by; 0.2.", show_default=False)
    ] = None,
    sampler: Annotated[str, typer.Option(help="What proposes options: tpe or random.")] = "",
    pruner: Annotated[str, typer.Option(help="What cuts trials short: median, halving or none.")] = "",
    metric: Annotated[str, typer.Option(help="Metric to optimise: accuracy, clients_mean ...")] = "",
    out: Annotated[Path | None, typer.Option(help="The study's folder; runs/tune-NAME.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that search methods side by side.")] = 1,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many minutes; the same command continues.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the folder.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Search the options of several methods, with equal budgets, on validation rows; `compare` takes the result.

    Started again, it continues with the rest of the budget.
    """

    def work() -> int:
        from rich.console import Console

        from consilience.compare.command import numbers, split
        from consilience.compare.tables import on_screen, study
        from consilience.tuning.tune import Tuner

        path, overrides = split(arguments or [])
        tuner = Tuner.planned(
            path,
            overrides,
            algorithms=[name.strip() for name in algorithms.split(",") if name.strip()],
            folder=out,
            trials=trials,
            seeds=numbers(seeds),
            seed=seed,
            validation=validation,
            sampler=sampler,
            pruner=pruner,
            metric=metric,
        )
        console = Console(stderr=True, quiet=quiet)
        console.print(tuner.in_one_line, highlight=False, soft_wrap=True)

        def notify(label: str, number: int, text: str) -> None:
            line = f"{label}, trial {number + 1} of {tuner.tuning.search.trials}: {text}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

        made, found, files = tuner.run(jobs=jobs, minutes=minutes, notify=notify)
        if quiet:
            print(tuner.tuning.folder)
        else:
            Console().print(on_screen([study(found)], []), highlight=False)
            Console().print(f"written: {', '.join(map(str, files))}", highlight=False, soft_wrap=True)
        for problem in made.problems:
            console.print(problem, highlight=False, markup=False, soft_wrap=True)
        if made.signal or (not made.complete and not made.problems):
            console.print("stopped; the same command goes on with what is missing")
        return 128 + made.signal if made.signal else UNEXPECTED if made.problems else 0

    guarded(work, debug)
