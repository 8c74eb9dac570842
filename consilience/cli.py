"""The command line, `consilience run | resume | compare | show ...`; see `failures` for the exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilience.commands.arguments import given, split
from consilience.commands.check import check
from consilience.commands.help_text import PlainHelp
from consilience.commands.init import init
from consilience.commands.listing import list_
from consilience.commands.predict import predict
from consilience.commands.show_algorithm import show_algorithm
from consilience.compare.command import compare
from consilience.dashboard.command import dashboard
from consilience.diagnose.command import diagnose
from consilience.experiments.learn_command import learn
from consilience.flower.audit.command import audit
from consilience.flower.deploy.commands import deploy, verify
from consilience.reporting.command import after_run
from consilience.reporting.command import report as report_command
from consilience.runs.failures import guarded
from consilience.tuning.command import tune

if TYPE_CHECKING:  # PyTorch takes seconds to import: `--help` must not wait for it
    from rich.console import Console

    from consilience.experiments.live_run import Run
    from consilience.runs.observation import Observation
    from consilience.runs.result import Result

app = typer.Typer(
    name="consilience",
    help="Federated learning for clients that differ.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    cls=PlainHelp,
)
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the run folder.")]
Log = Annotated[str, typer.Option(help="Log there, too: csv, tensorboard, mlflow, wandb or aim.", show_default=False)]
Report = Annotated[
    bool, typer.Option(envvar="CONSILIENCE_REPORT", help="Draw report.html in the run folder (needs matplotlib).")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, such as rounds=50.", show_default=False)
]


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"consilience {importlib.metadata.version('consilience')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated learning for clients that differ."""


@app.command()
def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="A TOML file, or none for the default run; settings such as algorithm.lr=0.05 algorithm=fedprox.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="What to call the run; numbered if there is one already.")] = "",
    folder: Annotated[Path | None, typer.Option(help="The run folder itself; it must not hold a run.")] = None,
    log: Log = "",
    report: Report = True,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train, and write a run folder that can be resumed, shown and repeated."""

    def work() -> int:
        from consilience.experiments import runner
        from consilience.experiments.config import config

        path, overrides = split(arguments or [])
        settings = config.load(path, [*overrides, *given(name=name, log=log)])
        return conclude(
            runner.execute(settings, folder=folder, watch=watcher(quiet), report=drawing(report)), quiet, report
        )

    guarded(work, debug)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="The folder of the run.")],
    settings: Settings = None,
    force: Annotated[bool, typer.Option(help="Continue although code, data or settings changed (recorded).")] = False,
    log: Log = "",
    report: Report = True,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Continue a run exactly where its last checkpoint is, or add rounds to a finished one."""

    def work() -> int:
        from consilience.experiments import runner

        return conclude(
            runner.proceed(
                run, [*(settings or []), *given(log=log)], force=force, watch=watcher(quiet), report=drawing(report)
            ),
            quiet,
            report,
        )

    guarded(work, debug)


@app.command()
def migrate(
    config: Annotated[Path, typer.Argument(help="A config file of a run, a comparison or a deployment.")],
    out: Annotated[Path | None, typer.Option(help="Where the new file goes; the old one is replaced.")] = None,
    debug: Debug = False,
) -> None:
    """Replace renamed settings in a config file; comments, order and layout are kept."""

    def work() -> int:
        from consilience.experiments.config import migrate
        from consilience.runs import disk, toml_text

        toml_text.read(config)  # raises unless it is a config file
        text, changes = migrate.migrate(config.read_bytes().decode("utf-8"))
        if changes or out is not None:
            disk.replace_file(out or config, text.encode("utf-8"))
        for change in changes:
            console().print(f"{config}: {change}", highlight=False, markup=False, soft_wrap=True)
        if not changes:
            console().print(f"{config}: every name is up to date", highlight=False, markup=False, soft_wrap=True)
        return 0

    guarded(work, debug)


@app.command()
def show(
    run: Annotated[Path | None, typer.Argument(help="The folder of a run; none lists the runs.")] = None,
    runs: Annotated[Path, typer.Option(help="Where to look for runs.")] = Path("runs"),
    rows: Annotated[int, typer.Option(min=1, help="How many rounds to show.")] = 10,
    config: Annotated[bool, typer.Option("--config", help="Print the whole config too.")] = False,
    debug: Debug = False,
) -> None:
    """Show a run's settings and metrics, or list the runs."""

    def work() -> int:
        from consilience.reporting import terminal
        from consilience.runs import folder

        if run is None:
            console().print(terminal.run_list(folder.runs(runs)), highlight=False)
            return 0
        console().print(terminal.whole_run(folder.RunFolder.open(run), rows, config), highlight=False, soft_wrap=True)
        return 0

    guarded(work, debug)


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of the run.")],
    settings: Settings = None,
    data: Annotated[str, typer.Option(help="Another data set to test on.")] = "",
    everyone: Annotated[bool, typer.Option("--all", help="List every client.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The best model on the validation rows.")] = False,
    debug: Debug = False,
) -> None:
    """Test a run's latest or best model: over all test rows, and client by client."""

    def work() -> int:
        from consilience.experiments import retest
        from consilience.reporting import terminal

        overrides = [*(settings or []), *([f"data.name={data}"] if data else [])]
        found = retest.retest(run, overrides, best=best)
        for note in found.notes:
            print(f"warning: the model of round {found.round} is tested, because {note}", file=sys.stderr)
        console().print(f"{run}, after round {found.round}", highlight=False)
        console().print(terminal.scores(found.scores, found.names, everyone=everyone), highlight=False)
        if found.personal is not None:
            console().print("", terminal.personal(found.personal), sep="\n", highlight=False)
        return 0

    guarded(work, debug)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of the run.")],
    format: Annotated[str, typer.Option(help="safetensors, torch-export, onnx or hugging_face.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="The folder to write; RUN/export/FORMAT.")] = None,
    adapters: Annotated[str, typer.Option(help="In a Hugging Face folder: merged or separate.")] = "merged",
    best: Annotated[bool, typer.Option("--best", help="The best model on the validation rows.")] = False,
    debug: Debug = False,
) -> None:
    """Write a run's latest or best model for other programs."""

    def work() -> int:
        from typing import Any, cast

        from consilience.experiments import retest

        result, round = retest.latest(run, best=best)
        place = result.export(out or run / "export" / format, cast(Any, format), adapters=cast(Any, adapters))
        console().print(f"{place}, after round {round}", highlight=False, soft_wrap=True)
        return 0

    guarded(work, debug)


app.command()(init)
app.command()(check)
app.command()(predict)
app.command("list")(list_)
app.command("show-algorithm")(show_algorithm)
app.command()(learn)
app.command()(compare)
app.command()(tune)
app.command()(diagnose)
app.command("report")(report_command)
app.command()(dashboard)
app.command()(verify)
app.command()(audit)
app.add_typer(deploy, cls=PlainHelp)


def main() -> None:
    """The entry point of the `consilience` command."""
    app()


def console() -> Console:
    """The console for results."""
    from rich.console import Console

    return Console()


def watcher(quiet: bool) -> Callable[[Run], Iterator[Observation]] | None:
    """Shows the run's settings, then its rounds as they finish."""
    if quiet:
        return None

    def watch(live: Run) -> Iterator[Observation]:
        from rich.console import Console

        from consilience.reporting import progress, terminal

        console = Console(stderr=True)
        whole = not console.is_terminal  # a terminal would break the line within words
        console.print(terminal.overview(live.folder.facts(), live.config.table()), highlight=False, soft_wrap=whole)
        for note in live.notes:
            console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=whole)
        if live.done:
            console.print(f"continuing after round {live.done}", highlight=False)
        rounds = live.config.rounds
        return progress.shown(live.observations(), rounds=rounds, done=live.done, console=console)

    return watch


def drawing(wanted: bool) -> Callable[[Result], Path | None] | None:
    """Returns a function that draws the report of a run before its tracker is closed, so that the tracker stores it."""

    def draw(result: Result) -> Path | None:
        after_run(result)
        assert result.folder is not None
        page = result.folder / "report.html"
        return page if page.is_file() else None

    return draw if wanted else None


def conclude(result: Result, quiet: bool, pictures: bool) -> int:
    """Print the results table, the run folder, next steps and the path of the report; return the exit code."""
    from consilience.reporting import terminal
    from consilience.runs.folder import RunFolder

    assert result.folder is not None
    if quiet:
        print(result.folder)
    else:
        timing = RunFolder.open(result.folder).timing.read().rows
        console().print(terminal.results(result.history, timing, result.task.metrics.rows), highlight=False)
        console().print(terminal.next_steps(result.folder, bool(result.stopped)), highlight=False, soft_wrap=True)
        if pictures:
            console().print(after_run(result), highlight=False, soft_wrap=True, markup=False)
    return 128 + result.stopped if result.stopped else 0


if __name__ == "__main__":
    main()
