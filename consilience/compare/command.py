"""The command `consilience compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilience.runs.failures import UNEXPECTED, guarded

if TYPE_CHECKING:
    from consilience.compare.plan import Comparison

_OWN_TABLES = {
    "compare": {"methods": "--algorithms", "seeds": "--seeds", "baseline": "--baseline", "target": "--target"}
    | {"metric": "--metric", "tuned": "the study's folder instead of a config"},
    "tune": {name: f"--{name}" for name in ("trials", "seeds", "seed", "validation", "sampler", "pruner", "metric")},
}
"""Keys of tables that are not part of a run, and what to write on the command line instead."""
_OPTIONS = {"methods": "--algorithms"} | {name: f"--{name}" for name in ("algorithms", "seeds", "trials", "jobs")}


def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG|STUDY] [KEY=VALUE]...",
            help="A run's TOML file, with a [compare] table or none, or the folder of `consilience tune`; settings for "
            "all methods, such as rounds=50.",
            show_default=False,
        ),
    ] = None,
    algorithms: Annotated[str, typer.Option(help="Methods, with commas between: fedavg,fedprox,simprox.")] = "",
    grid: Annotated[
        list[str] | None, typer.Option(help="Options to try: fedprox.mu=[0.01,0.1], or all.lr=[0.1,0.2].")
    ] = None,
    seeds: Annotated[str, typer.Option(help="With commas between: 0,1,2. Each draws partition, start and trace.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE, as among the arguments; may be repeated.")
    ] = None,
    baseline: Annotated[str, typer.Option(help="The method to test the others against; fedavg, or the first.")] = "",
    target: Annotated[
        float | None,
        typer.Option(help="Value of the main metric to reach, such as 0.9: how soon, at what cost."),
    ] = None,
    metric: Annotated[str, typer.Option(help="Metric to test: accuracy, clients_mean, clients_worst_tenth ...")] = "",
    out: Annotated[Path | None, typer.Option(help="The comparison's folder; runs/compare-NAME.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that run cells side by side.")] = 1,
    together: Annotated[
        int, typer.Option(min=1, help="Runs whose clients train in one vectorised group (engine.lane=batched).")
    ] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the folder.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Run several methods on the same federation, over several seeds, and test which are better.

    Started again, it continues with what is missing; finished runs are never run again.
    """

    def work() -> int:
        from consilience.compare import plan

        path, overrides = split([*(arguments or []), *(settings or [])])
        comparison = plan.plan(
            path,
            overrides,
            algorithms=[name.strip() for name in algorithms.split(",") if name.strip()],
            grids=grid or [],
            seeds=numbers(seeds),
            baseline=baseline,
            target=target,
            metric=metric,
            folder=out,
        )
        return carry_out(comparison, jobs, quiet, together)

    guarded(work, debug)


def carry_out(comparison: Comparison, jobs: int, quiet: bool, together: int = 1) -> int:
    """Run what is missing, write the tables, and show them; the exit code."""
    from rich.console import Console

    from consilience.compare import fairness, pages, running

    console = Console(stderr=True, quiet=quiet)
    cells = len(comparison.cells)
    console.print(
        f"{len(comparison.methods)} methods x {len(comparison.seeds)} seeds = {cells} runs in {comparison.folder}",
        highlight=False,
        soft_wrap=True,
    )
    for note in fairness.planned_differences(comparison):
        console.print(f"differs in more than the method: {note}", highlight=False, markup=False, soft_wrap=True)
    ended = running.execute(comparison, jobs=jobs, console=console, together=together)
    written = pages.write(comparison)
    signal = next((found.signal for found in ended.values() if found.signal), 0)
    failed = [name for name, found in ended.items() if found.status == "failed"]
    if quiet:
        print(comparison.folder)
    else:
        out = Console()
        out.print(written.screen, highlight=False)
        out.print(f"written: {', '.join(str(path) for path in written.files)}", highlight=False, soft_wrap=True)
    if signal:
        console.print("stopped; the same command goes on with what is missing")
        return 128 + signal
    for name in failed:
        console.print(f"{name}: {ended[name].text}", highlight=False, markup=False, soft_wrap=True)
    return UNEXPECTED if failed else 0


def split(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The config file, if any, and the overrides among the arguments."""
    from consilience.core.settings import Invalid

    paths = [text for text in arguments if "=" not in text]
    if len(paths) > 1:
        raise Invalid(f"{paths[1]!r} is neither the config file ({paths[0]!r} is) nor a setting: write key=value")
    overrides = [text for text in arguments if "=" in text]
    for text in overrides:
        _refuse_own_table(text.partition("=")[0].strip())
    return paths[0] if paths else None, overrides


def _refuse_own_table(key: str) -> None:
    """Refuse `compare.seeds=...`: the tables [compare] and [tune] of a file have options of the command instead."""
    from consilience.core.settings import Invalid

    if key in _OPTIONS:
        raise Invalid(f"{key} is not a setting of a run: write {_OPTIONS[key]}")
    table, _, name = key.partition(".")
    if table in _OWN_TABLES:
        option = _OWN_TABLES[table].get(name)
        instead = f"write {option} to `consilience {table}`" if option else f"write it in the file's [{table}] table"
        raise Invalid(f"{key} is not a setting of a run: {instead}")


def numbers(text: str) -> list[int]:
    """'0,1,2' or '0-4' as whole numbers."""
    from consilience.core.settings import Invalid

    found: list[int] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(word) > 40:
            raise Invalid(f"--seeds {text!r} cannot be read: write 0,1,2 or 0-4")
        ends = int(first), int(last or first)
        if ends[1] - ends[0] > 10_000 or ends[1] < ends[0]:
            raise Invalid(f"--seeds {text!r}: {word} is no range of seeds: write 0,1,2 or 0-4")
        found += range(ends[0], ends[1] + 1)
    return found
