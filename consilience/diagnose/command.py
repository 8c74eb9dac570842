"""The command `consilience diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilience.runs.failures import guarded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from consilience.diagnose.advice import Advice
    from consilience.diagnose.diagnosis import Diagnosis


def diagnose(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG|RUN] [KEY=VALUE]...",
            help="A run's TOML file or folder, or none for the default run; settings such as partition.alpha=0.1.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of FedAvg to look ahead; a run folder has its own.")] = 5,
    encoder: Annotated[str, typer.Option(help="In which features inputs are compared: random, or model.")] = "random",
    out: Annotated[Path, typer.Option(help="Where the page and the numbers go: NAME.html and NAME.json.")] = Path(
        "diagnosis.html"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the page.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Say how heterogeneous a federation is, in which ways, and which methods fit it."""

    def work() -> int:
        from rich.console import Console

        from consilience.compare.command import split
        from consilience.diagnose import diagnosis
        from consilience.diagnose.advice import advise
        from consilience.diagnose.page import page
        from consilience.runs import canonical
        from consilience.runs.disk import make_folder, replace_file

        path, overrides = split(arguments or [])
        console = Console(stderr=True, quiet=quiet)
        found = diagnosis.diagnose(
            Path(path) if path is not None else None,
            overrides,
            rounds=rounds,
            encoder=encoder,
            say=lambda text: console.print(f"{text} ...", highlight=False, markup=False),
        )
        advice = advise(found)
        make_folder(out.parent)
        table = {**found.table(), "advice": [item._asdict() for item in advice]}
        numbers = out.with_suffix(".json")
        replace_file(numbers, canonical.encode(table, pretty=True))
        replace_file(out, page(found, advice).encode())
        if quiet:
            print(out)
        else:
            Console().print(on_screen(found, advice), highlight=False)
            Console().print(f"page: {out}; numbers: {numbers}", highlight=False, soft_wrap=True)
        return 0

    guarded(work, debug)


def on_screen(found: Diagnosis, advice: Sequence[Advice]) -> RenderableType:
    """The lines and the advice for a terminal."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from consilience.diagnose.text import lines

    table = Table("", "found", "chance", "", header_style="bold", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for line in lines(found):
        table.add_row(escape(line.what), escape(line.found), escape(line.chance), escape(line.means))
    counsel = [Text(f"{item.kind}: {item.what}\n    {item.because}") for item in advice]
    title = Text(f"{found.title}: {len(found.names)} clients", style="bold")
    return Group(title, table, "", *counsel)
