"""`consilience report`: from run folders to one HTML file, and PNGs beside it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilience.core.settings import Invalid
from consilience.reporting import page, style
from consilience.reporting.figure_set import FigureSet, compiled
from consilience.reporting.groups import grouped
from consilience.reporting.runs import find
from consilience.runs.disk import make_inner_folder, replace_file
from consilience.runs.failures import guarded

NAME = "report.html"
NO_FIGURES = 'Figures need matplotlib: pip install "consilience[report]".'


def write(
    paths: Sequence[Path], out: Path | None = None, *, pictures: bool = True, likeness_too: bool | None = None
) -> Path:
    """Report on runs, or on folders of runs; where the page is."""
    out = place(paths, out)
    runs, problems = find(paths)
    if not runs:
        raise Invalid("no run could be read: " + "; ".join(problems))
    groups = grouped(runs)
    with style.drawing():
        figures = compiled(groups, likeness_too=likeness_too)
        text = page.report(groups, figures, problems)
        out.parent.mkdir(parents=True, exist_ok=True)
        if pictures:
            _write_pictures(figures, out)
    replace_file(out, text.encode())
    return out


def place(paths: Sequence[Path], out: Path | None) -> Path:
    """Where the page goes: into the run's own folder or that of several, else here."""
    if not paths:
        raise Invalid("no run was named: give run folders, or a folder that holds some")
    if out is None:
        return Path(paths[0]) / NAME if len(paths) == 1 else Path(NAME)
    if out.suffix.lower() not in (".html", ".htm"):
        raise Invalid(f"--out = {str(out)!r} must end in .html: the pictures go to a folder of that name beside it")
    return out


def is_possible() -> bool:
    """Whether what draws is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def figures_of(out: Path) -> Path:
    """The folder of a page's PNGs."""
    return out.with_name(f"{out.stem}-figures")


def _write_pictures(figures: FigureSet, out: Path) -> None:
    """Every picture as a PNG; those that an earlier report left there and this one has not are removed."""
    folder = figures_of(out)
    make_inner_folder(folder)
    names = {f"{picture.name}.png" for picture in figures.pictures()}
    for old in folder.glob("*.png"):
        if (old.is_file() or old.is_symlink()) and old.name not in names:
            old.unlink()
    for picture in figures.pictures():
        replace_file(folder / f"{picture.name}.png", style.png(picture))


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
            help="Who resembles whom, and swaps; by default where clients are simulated.",
            show_default=False,
        ),
    ] = None,
    pictures: Annotated[bool, typer.Option(help="Write every figure as a PNG, too.")] = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Draw runs: one HTML file that needs no network, and PNGs. Runs that differ in their seed only are one curve."""

    def work() -> int:
        from consilience.reporting import report

        page = report.write(runs, out, pictures=pictures, likeness_too=similarity)
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
    except Exception as problem:  # the run itself is done and saved: a picture must not fail it
        return f"no report could be drawn ({type(problem).__name__}: {problem})"
