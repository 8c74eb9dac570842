"""One HTML page that needs nothing else: no script, no network, every text from outside escaped."""

from __future__ import annotations

import functools
import html
import importlib.resources
from collections.abc import Sequence
from typing import Any

from consilience.reporting import style, tables
from consilience.reporting.figure_set import FigureSet
from consilience.reporting.groups import Group
from consilience.reporting.privacy import not_private
from consilience.reporting.runs import RunData
from consilience.reporting.style import Figure
from consilience.runs.toml_text import dumps

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Nothing is loaded and nothing runs; pictures inside the drawings are part of the page."""

_OPEN = 3  # groups whose details are unfolded


def escaped(text: Any) -> str:
    """Text as text, in an element or in an attribute."""
    return html.escape(str(text), quote=True)


def document(title: str, body: str, *, refresh: int = 0) -> str:
    """A whole page around a body; with `refresh` it loads again after so many seconds."""
    again = f'<meta http-equiv="refresh" content="{refresh}">\n' if refresh else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"{again}<title>{escaped(title)}</title>\n<style>\n{stylesheet()}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


@functools.cache
def stylesheet() -> str:
    """The page's looks."""
    return (importlib.resources.files("consilience.reporting") / "page.css").read_text(encoding="utf-8")


def content(groups: Sequence[Group], figures: FigureSet, problems: Sequence[str] = ()) -> str:
    """The body of a report: numbers, figures of all groups, then group by group."""
    runs = [run for group in groups for run in group.runs]
    many = len(groups) > 1
    parts = [heading(groups), *_warnings(runs, problems), table(tables.final_numbers(groups), swatches=many)]
    parts.append(table(tables.costs(groups), swatches=many))
    parts.append(gallery(figures.common))
    parts += [_group(*entry, number, len(groups)) for number, entry in enumerate(figures.details)]
    if figures.left_out:
        parts.append(f'<p class="soft">{figures.left_out} more groups are in the common figures only.</p>')
    parts.append(f"<h2>Runs</h2>{table(tables.each_run(runs))}")
    parts.append("<footer>Made by <code>consilience report</code> from the records in the run folders.</footer>")
    return "\n".join(parts)


def title(groups: Sequence[Group]) -> str:
    """What the report is about, in a line."""
    if len(groups) == 1:
        return groups[0].label
    data = list(dict.fromkeys(run.data for group in groups for run in group.runs))
    return f"{len(groups)} methods on {', '.join(data[:3])}" + (" ..." if len(data) > 3 else "")


def heading(groups: Sequence[Group]) -> str:
    """Title, and what is compared in a sentence."""
    runs = [run for group in groups for run in group.runs]
    seeds = sorted({run.seed for run in runs})
    models = sorted({str(_name(run.config.get("model"))) for run in runs})
    parameters = sorted({run.facts["parameters"] for run in runs if isinstance(run.facts.get("parameters"), int)})
    said = [f"{len(runs)} run{'s' * (len(runs) > 1)}", f"{_span({run.count for run in runs})} clients"]
    said += [f"model {', '.join(models)}", *([f"{_span(set(parameters))} parameters"] if parameters else [])]
    said += [f"seeds {', '.join(map(str, seeds))}"] if len(seeds) > 1 else []
    return f'<h1>{escaped(title(groups))}</h1>\n<p class="soft">{escaped("; ".join(said))}</p>'


def _name(section: Any) -> Any:
    return section.get("name", "?") if isinstance(section, dict) else section


def _span(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def gallery(pictures: Sequence[Figure]) -> str:
    """Figures side by side, as many as fit."""
    if not pictures:
        return ""
    return f'<div class="grid">\n{"".join(map(_figure, pictures))}</div>'


def table(found: tables.Table, *, swatches: bool = False, links: Sequence[str] = ()) -> str:
    """A table that scrolls by itself where it is too wide; `links` lead from the first column."""
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in found.head)
    lines = []
    for number, (first, *rest) in enumerate(found.lines):
        mark = f'<span class="swatch" style="background: var(--line-{number % len(style.LINES)})"></span>'
        name = f'<a href="{escaped(links[number])}">{escaped(first)}</a>' if links else escaped(first)
        cells = "".join(f"<td>{escaped(cell)}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{mark if swatches else ""}{name}</th>{cells}</tr>')
    body = "\n".join(lines)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _figure(picture: Figure) -> str:
    drawing = style.svg(picture).replace("<svg ", f'<svg role="img" aria-label="{escaped(picture.title)}" ', 1)
    return (
        f"<figure>\n<h3>{escaped(picture.title)}</h3>\n{drawing}\n"
        f"<figcaption>{escaped(picture.caption)}</figcaption>\n</figure>\n"
    )


def _group(group: Group, pictures: list[Figure], number: int, count: int) -> str:
    run = group.first
    which = f"Shown: run {run.name}, seed {run.seed}." if len(group.runs) > 1 or count > 1 else f"Run {run.name}."
    settings = escaped(dumps(run.config))
    return (
        f'<details class="group"{" open" * (number < _OPEN)}><summary><h2>{escaped(group.label)}</h2></summary>\n'
        f'<p class="soft">{escaped(which)} {escaped(_origin(run))}</p>\n{gallery(pictures)}\n'
        f"<details><summary>Settings</summary><pre>{settings}</pre></details>\n</details>"
    )


def _origin(run: RunData) -> str:
    versions = run.facts.get("versions", {})
    known = [f"{key} {versions[key]}" for key in ("consilience", "torch", "python") if key in versions]
    return f"Created {run.facts.get('created', '?')}; {', '.join(known)}."


def _warnings(runs: Sequence[RunData], problems: Sequence[str]) -> list[str]:
    said = list(problems)
    for run in runs:
        said += [f"{run.name}: {note}" for note in run.notes]
        if run.facts.get("reason") and run.status not in ("finished", "running", "created"):
            said.append(f"{run.name}, {run.status}: {run.facts['reason']}")
        if warning := not_private(run.facts):
            said.append(f"{run.name} is {warning}")
        if run.facts.get("forced"):
            said.append(f"{run.name} was resumed by force after something had changed; see run.json")
    return [f'<p class="warn">{escaped(text)}</p>' for text in said]
