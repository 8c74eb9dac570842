"""The command `consilience list`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from consilience.commands.help_text import algorithm_names
from consilience.runs.failures import guarded

if TYPE_CHECKING:
    from consilience.experiments.config.catalogue import Entry


def list_(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Kinds (algorithms, data, settings ...), names, `options` or `all`; none: names only.",
            metavar="...",
            autocompletion=algorithm_names,
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

        known = everything()
        console = Console()
        width, lines = console.width, list[str]()
        names = {entry.name for entries in known.values() for entry in entries}
        wanted = list(what or [])
        found = catalogue.narrowed(known, wanted) if wanted else known
        if search:
            found = catalogue.searched(found, search)
            if not found:
                raise Invalid(f"nothing is described by {search!r}: try one word, or `consilience list` for all")
        if not what and not search:
            lines += catalogue_text.in_short(known, width)
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
            lines += [*catalogue_text.shared_options(known["algorithms"], width), ""]
        lines += _hints(width, bool(what))
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return 0

    guarded(work, debug)


def everything() -> dict[str, list[Entry]]:
    """The settings that no name determines, at the top and in sections of fixed fields, and then the catalogue."""
    import dataclasses

    from consilience.core.settings import Option, hints_of, options_of
    from consilience.experiments.config.catalogue import KINDS, SETTINGS, Entry, described, listing
    from consilience.experiments.config.config import FIXED, TASK, Config

    sections, hints = FIXED | TASK, hints_of(Config)
    at_top = [field for field in dataclasses.fields(Config) if field.name not in (*KINDS, "engine", *sections)]
    about = "At the top of a config, before any [section]."
    top = Entry(name="top", about=about, options={f.name: Option(hints[f.name], f.default) for f in at_top})
    entries = [described(section, kind, dict(options_of(kind))) for section, kind in sections.items()]
    whole = [dataclasses.replace(entry, about=" ".join(entry.text.split())) for entry in entries]
    return {SETTINGS: [top, *whole], **listing()}


def _hints(width: int, narrowed: bool) -> list[str]:
    from consilience.experiments.config.catalogue_text import wrapped

    hints = "`consilience list NAME` shows options, `consilience show-algorithm NAME` an algorithm in full"
    if not narrowed:
        hints = (
            "`consilience list KIND` has a line for each name (`list all`: of all kinds), `--search WORD` finds; "
            f"{hints}, `consilience list options` what all algorithms share"
        )
    return wrapped(hints + ".", width, "")
