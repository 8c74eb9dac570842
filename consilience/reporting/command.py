"""The command `consilience report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilience.runs.failures import guarded

if TYPE_CHECKING:
    from consilience.runs.result import Result


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.")],
    out: Annotated[
        Path | None, typer.Option(help="The page, FILE.html; its PNGs go to FILE-figures beside it.")
    ] = None,
    similarity: Annotated[
        bool | None,
        typer.Option(
            "--similarity/--no-similarity",
            help="Show similarity and swaps of clients; by default if they are simulated.",
            show_default=False,
        ),
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="Pictures only: no script in the page.")] = False,
    pictures: Annotated[bool, typer.Option(help="Write every figure as a PNG, too.")] = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Draw runs: one HTML file that needs no network, and PNGs. Runs that differ in their seed only are one curve."""

    def work() -> int:
        from consilience.reporting import report

        page = report.write(runs, out, pictures=pictures, static=static, with_similarity=similarity)
        print(page)
        if pictures:
            print(report.figures_of(page))
        return 0

    guarded(work, debug)


def after_run(result: Result) -> str:
    """Write the page of a run that has just ended, and say where it is; or how to get one."""
    from consilience.reporting import report

    assert result.folder is not None
    if not report.is_possible():
        return f'for pictures: pip install "consilience[report]", then consilience report {result.folder}'
    try:
        return f"report: {report.write([result.folder], pictures=False)}"
    except Exception as problem:  # the run is saved: an error in a figure must not fail it
        return f"no report could be drawn ({type(problem).__name__}: {problem})"
