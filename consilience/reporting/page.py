"""HTML pages from templates: one style, no network, no script but the figures', all external text escaped."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from consilience.reporting import interactive, style, tables
from consilience.reporting.charts import Figure
from consilience.reporting.figure_set import FigureSet
from consilience.reporting.groups import Group, metrics_of
from consilience.reporting.privacy import not_private
from consilience.reporting.runs import RunData
from consilience.runs.metric_table import main_of
from consilience.runs.text import best_model
from consilience.runs.toml_text import dumps

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Content security policy of a static page: nothing is loaded or run; images are embedded."""

_MOST_BYTES = 4_800_000  # of scripts, data and drawings: with its tables a page stays below 5 MB
_TOO_LARGE = "The figures are pictures, since there are too many for a small page: report on fewer runs at a time."
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")
_UNFOLDED = 3  # groups whose details are expanded


class Fact(NamedTuple):
    """A card at the top of a page."""

    label: str
    value: str
    note: str = ""


def render(template: str, *, title: str, figures: Sequence[Figure] = (), static: bool = False, **values: Any) -> str:
    """Render a page of `templates/` within `style.drawing()`; figures are interactive unless `static`."""
    size = sum(len(figure.svg) for figure in figures)
    bundle = None if static else interactive.bundle(figures, room=_MOST_BYTES - size)
    because = ""
    if figures and not static and bundle is None:
        because = _TOO_LARGE if interactive.is_possible() else interactive.MISSING
    elif bundle is not None and bundle.left_out:
        because = f"{bundle.left_out} figures are pictures only, so that the page stays below 5 MB."
    common = {"title": title, "heading": "", "refresh": 0, "made_by": "", "static_because": because}
    common |= {"interactive": bundle, "policy": POLICY if bundle is None else bundle.policy}
    return _environment().get_template(template).render({**common, **values})


def report(
    groups: Sequence[Group],
    figures: FigureSet,
    problems: Sequence[str] = (),
    *,
    template: str = "report.html",
    static: bool = False,
    **more: Any,
) -> str:
    """The report: numbers, figures of all groups, then group by group; `more` is for templates that extend it."""
    runs = [run for group in groups for run in group.runs]
    return render(
        template,
        title=title(groups),
        figures=figures.pictures(),
        static=static,
        cards=_facts(groups),
        warnings=[*problems, *_warnings(runs)],
        many=len(groups) > 1,
        seeds=max(len(group.runs) for group in groups),
        numbers=tables.final_numbers(groups),
        further=tables.further_numbers(groups),
        costs=tables.costs(groups),
        sections=figures.sections,
        details=[_details(group, pictures, len(groups)) for group, pictures in figures.details],
        unfolded=_UNFOLDED,
        left_out=figures.left_out,
        runs=tables.each_run(runs),
        made_by="consilience report",
        **more,
    )


def title(groups: Sequence[Group]) -> str:
    """The title of the report."""
    if len(groups) == 1:
        return groups[0].label
    data = list(dict.fromkeys(run.data for group in groups for run in group.runs))
    return f"{len(groups)} methods on {', '.join(data[:3])}" + (" ..." if len(data) > 3 else "")


def span(numbers: set[int]) -> str:
    """12, or 3 to 12."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("consilience.reporting"),
        autoescape=True,  # for every template, whatever its name ends in
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {"colours": len(style.LINES)}
    found.filters |= {"svg": _svg, "unbroken": _unbroken}
    return found


def _svg(picture: Figure) -> Markup:
    """The only markup outside templates: matplotlib has escaped its text."""
    from markupsafe import Markup

    return Markup(picture.svg)


def _unbroken(cell: str) -> str:
    """A deviation stays on one line; a narrow table breaks before it."""
    return cell.replace("± ", "±\N{NO-BREAK SPACE}")


def _facts(groups: Sequence[Group]) -> list[Fact]:
    """Cards with a summary of the comparison or, for one group, of its quality."""
    runs = [run for group in groups for run in group.runs]
    seeds = sorted({run.seed for run in runs})
    models = sorted({str(_name(run.config.get("model"))) for run in runs})
    parameters = {run.facts["parameters"] for run in runs if isinstance(run.facts.get("parameters"), int)}
    found = []
    if len(groups) == 1:
        main = main_of(metrics_of(groups))
        found.append(Fact(main.title, tables.spread(groups[0].final(main.key)), "at the last test"))
    else:
        found.append(Fact("methods", str(len(groups))))
    listed = ", ".join(map(str, seeds[:8])) + " ..." * (len(seeds) > 8)
    found.append(Fact("runs", str(len(runs)), f"{'seeds' if len(seeds) > 1 else 'seed'} {listed}"))
    found.append(Fact("rounds", span({len(run.rows) for run in runs})))
    found.append(Fact("clients", span({run.count for run in runs})))
    found.append(Fact("model", ", ".join(models), f"{span(parameters)} parameters" if parameters else ""))
    return found


def _name(section: Any) -> Any:
    return section.get("name", "?") if isinstance(section, dict) else section


def _details(group: Group, pictures: Sequence[Figure], count: int) -> dict[str, Any]:
    run = group.first
    which = f"Shown: run {run.name}, seed {run.seed}." if len(group.runs) > 1 or count > 1 else f"Run {run.name}."
    shown = f"{which} {_origin(run)}"
    return {"label": group.label, "shown": shown, "pictures": pictures, "settings": dumps(run.config)}


def _origin(run: RunData) -> str:
    versions = run.facts.get("versions", {})
    known = [f"{key} {versions[key]}" for key in ("consilience", "torch", "python") if key in versions]
    created = str(run.facts.get("created", "?"))
    if _MOMENT.fullmatch(created):
        created = f"{created[:10]} at {created[11:16]} UTC"
    return f"Created {created}; {', '.join(known)}."


def _warnings(runs: Sequence[RunData]) -> list[str]:
    said = []
    for run in runs:
        if found := best_model(run.facts):
            said.append(f"{run.name}, {found}")
        said += [f"{run.name}: {note}" for note in run.notes]
        if run.facts.get("reason") and run.status not in ("finished", "running", "created"):
            said.append(f"{run.name}, {run.status}: {run.facts['reason']}")
        if warning := not_private(run.facts):
            said.append(f"{run.name} is {warning}")
        if run.facts.get("forced"):
            said.append(f"{run.name} was resumed by force after something had changed; see run.json")
    return said
