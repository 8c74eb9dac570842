"""The command `consilience list`."""

from __future__ import annotations

from typing import Annotated

import typer

from consilience.runs.failures import guarded


def list_(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Kinds (algorithms, data, models ...), names, `options` or `all`; none: names only.", metavar="..."
        ),
    ] = None,
    search: Annotated[str, typer.Option(help="Only what these words describe, such as similarity.")] = "",
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Show what a config can name: all names, a kind with a line per name, or a name with its options and defaults."""

    def work() -> int:
        from rich.console import Console

        from consilience.core.settings import Invalid
        from consilience.experiments.config import catalogue, catalogue_text

        everything = catalogue.listing()
        console = Console()
        width, lines = console.width, list[str]()
        names = {entry.name for entries in everything.values() for entry in entries}
        wanted = list(what or [])
        found = catalogue.narrowed(everything, wanted) if wanted else everything
        if search:
            found = catalogue.searched(found, search)
            if not found:
                raise Invalid(f"nothing is described by {search!r}: try one word, or `consilience list` for all")
        if not what and not search:
            lines += catalogue_text.in_short(everything, width)
            found = {}
        for title, entries in found.items():
            detailed = [entry for entry in entries if entry.name in wanted]
            if detailed:
                lines.append(title)
                lines += [f"  {line}" for e in detailed for line in catalogue_text.entry_text(e, width - 2)]
            else:
                lines += catalogue_text.overview(title, entries, width, ranked=bool(search))
            lines.append("")
        if catalogue.SHARED in wanted or (found.get("algorithms") and not names & set(wanted) and what):
            lines += [*catalogue_text.shared_options(everything["algorithms"], width), ""]
        lines += _hints(width, bool(what))
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return 0

    guarded(work, debug)


def _hints(width: int, narrowed: bool) -> list[str]:
    from consilience.experiments.config.catalogue_text import wrapped

    hints = "`consilience list NAME` shows options, `consilience show-algorithm NAME` an algorithm in full"
    if not narrowed:
        hints = (
            "`consilience list KIND` has a line for each name (`list all`: of all kinds), `--search WORD` finds; "
            f"{hints}, `consilience list options` what all algorithms share"
        )
    return wrapped(hints + ".", width, "")
