"""The files of a comparison: comparison.html, table.md, methods.csv, cells.csv, results.json."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType

from consilience.compare import drawings, fairness, results, tables
from consilience.compare.plan import Comparison
from consilience.reporting import page, report, style
from consilience.reporting.tables import Table
from consilience.runs import canonical
from consilience.runs.disk import replace_file

DIFFERS = "differs in more than the method"


@dataclass(frozen=True, eq=False, kw_only=True)
class ComparisonOutput:
    """The tables for the terminal, and the files."""

    screen: RenderableType
    files: tuple[Path, ...]


def write(comparison: Comparison) -> ComparisonOutput:
    """Read every cell, and write the tables of those that exist."""
    collected = results.collect(comparison)
    sheets, said = tables.sheets(comparison, collected), notes(comparison, collected.cells, collected.methods)
    texts = {
        "table.md": tables.markdown(comparison.folder.name, sheets, said),
        "methods.csv": tables.methods_csv(collected),
        "cells.csv": tables.cells_csv(collected),
    }
    found = results.plain_results(comparison, collected) | {"notes": said}
    files = {name: text.encode() for name, text in texts.items()}
    files["results.json"] = canonical.encode(found, pretty=True)
    files["comparison.html"] = _page(comparison, collected, sheets, said).encode()
    for name, content in files.items():
        replace_file(comparison.folder / name, content)
    return ComparisonOutput(
        screen=tables.on_screen(sheets, said), files=tuple(comparison.folder / name for name in files)
    )


def _page(
    comparison: Comparison, found: results.Results, sheets: Sequence[tables.TextTable], said: Sequence[str]
) -> str:
    """The tables and notes as one self-contained HTML file, with figures if matplotlib is installed."""
    drawable = report.is_possible()
    pictures = drawings.figures(comparison, found) if drawable else []
    with style.drawing() if drawable else contextlib.nullcontext():
        return page.render(
            "comparison.html",
            title=f"Comparison: {comparison.folder.name}",
            cards=_facts(comparison, found),
            warnings=[note for note in said if note.startswith(DIFFERS)],
            notes=[note for note in said if not note.startswith(DIFFERS)],
            sheets=[(sheet, Table(head=sheet.head, lines=sheet.rows)) for sheet in sheets],
            pictures=pictures,
            figures=pictures,
            no_figures="" if drawable else report.NO_FIGURES,
            made_by="consilience compare",
        )


def _facts(comparison: Comparison, found: results.Results) -> list[page.Fact]:
    done = sum(method.finished for method in found.methods)
    return [
        page.Fact("methods", str(len(comparison.methods)), f"baseline: {comparison.baseline}"),
        page.Fact("seeds", str(len(comparison.seeds)), ", ".join(map(str, comparison.seeds[:8]))),
        page.Fact("finished runs", f"{done} of {len(found.cells)}"),
        page.Fact("compared by", found.main.title, f"{found.main.better} is better"),
    ]


def notes(
    comparison: Comparison, cells: Sequence[results.CellResult], methods: Sequence[results.MethodResult]
) -> list[str]:
    """Notes for the reader: differences other than the method, missing runs, and what the number of seeds can show."""
    differing = [*fairness.planned_differences(comparison), *fairness.recorded_differences(comparison, cells)]
    said = [f"{DIFFERS}: {note}" for note in differing]
    if not differing:
        said.append("all methods ran on the same data, partition, initial model and trace of clients")
    if comparison.tuned is not None:
        said.append(f"options were tuned: {comparison.tuned.budget}; the seeds compared here are others")
        said += [f"tuned with other settings: {change}" for change in fairness.since_tuning(comparison)]
    missing = sum(found.missing for found in methods)
    if missing:
        said.append(f"{missing} of {len(cells)} runs are not finished: the tables hold the others")
    for cell in comparison.cells:
        if cell.seed == comparison.seeds[0] and cell.config.algorithm.options.get("noise_seed") is not None:
            private = cell.config.algorithm.name == "dp_fedavg"
            said += [f"{cell.method}: not private, its noise is drawn from algorithm.noise_seed"] if private else []
    for found in methods:
        if found.diverged:
            said.append(f"{found.method.label}: {found.diverged} of its runs diverged and have no numbers")
    most = max((test.n for found in methods for test in found.against.values()), default=0)
    tested = sum(bool(found.against) for found in methods)
    if tested and most < 6:
        said.append(
            "one seed cannot be tested: give several, such as --seeds 0-5"
            if most == 1
            else f"n = {most} seeds is too small for the exact tests: their p cannot be below "
            f"{2.0 ** (1 - most):.3g}, so that only the t test, which assumes normal differences, could show "
            "anything; six seeds allow 0.031"
        )
    if tested > 1:
        said.append(
            f"{tested} methods are tested against {comparison.baseline}, without correction: among that many, "
            f"about {tested / 20:.2g} come out below p = 0.05 by chance alone"
        )
    return said
