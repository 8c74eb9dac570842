"""`consilience report`: from run folders to one HTML file, and PNGs beside it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from consilience.core.settings import Invalid
from consilience.reporting import page, style
from consilience.reporting.figure_set import FigureSet, compiled
from consilience.reporting.groups import grouped
from consilience.reporting.runs import find
from consilience.runs.disk import make_inner_folder, replace_file

NAME = "report.html"
NO_FIGURES = 'Figures need matplotlib: pip install "consilience[report]".'


def write(
    paths: Sequence[Path],
    out: Path | None = None,
    *,
    pictures: bool = True,
    static: bool = False,
    with_similarity: bool | None = None,
) -> Path:
    """Write the report on runs, or on folders of runs; the path of the page."""
    out = place(paths, out)
    runs, problems = find(paths)
    if not runs:
        raise Invalid("no run could be read: " + "; ".join(problems))
    groups = grouped(runs)
    with style.drawing():
        figures = compiled(groups, with_similarity=with_similarity)
        text = page.report(groups, figures, problems, static=static)
        out.parent.mkdir(parents=True, exist_ok=True)
        if pictures:
            _write_pictures(figures, out)
    replace_file(out, text.encode())
    return out


def place(paths: Sequence[Path], out: Path | None) -> Path:
    """The path of the page: in the run's folder or the folder of several runs, else in the working directory."""
    if not paths:
        raise Invalid("no run was named: give run folders, or a folder that holds some")
    if out is None:
        return Path(paths[0]) / NAME if len(paths) == 1 else Path(NAME)
    if out.suffix.lower() not in (".html", ".htm"):
        raise Invalid(f"--out = {str(out)!r} must end in .html: the pictures go to a folder of that name beside it")
    return out


def is_possible() -> bool:
    """Whether Matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def figures_of(out: Path) -> Path:
    """The folder of a page's PNGs."""
    return out.with_name(f"{out.stem}-figures")


def _write_pictures(figures: FigureSet, out: Path) -> None:
    """Write every figure as a PNG; PNGs of an earlier report that this one does not have are removed."""
    folder = figures_of(out)
    make_inner_folder(folder)
    names = {f"{picture.name}.png" for picture in figures.pictures()}
    for old in folder.glob("*.png"):
        if (old.is_file() or old.is_symlink()) and old.name not in names:
            old.unlink()
    for picture in figures.pictures():
        replace_file(folder / f"{picture.name}.png", style.png(picture))
