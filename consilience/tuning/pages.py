"""A study for people: a table of the methods' best options, and curves of the best value against the trials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consilience.compare.tables import markdown, study
from consilience.compare.tuned import Tuned, TunedMethod
from consilience.reporting import page, report, style
from consilience.reporting.style import Figure
from consilience.reporting.tables import Table
from consilience.runs.disk import replace_file

_CURVES = 8  # in one figure: more cannot be told apart


def write(found: Tuned, folder: Path) -> list[Path]:
    """tuned.md, and with Matplotlib tuned.html with the curves."""
    table = study(found)
    replace_file(folder / "tuned.md", markdown(folder.name, [table], []).encode())
    if not report.is_possible():
        return [folder / "tuned.md"]
    with style.drawing():
        text = page.render(
            "tuning.html",
            title=f"Tuning: {folder.name}",
            cards=[page.Fact("methods", str(len(found.methods))), page.Fact("budget", found.budget)],
            sheet={"title": table.title, "table": Table(head=table.head, lines=table.rows)},
            pictures=curves(found),
            made_by="consilience tune",
        )
        replace_file(folder / "tuned.html", text.encode())
    return [folder / "tuned.md", folder / "tuned.html"]


def curves(found: Tuned) -> list[Figure]:
    """The best validation value so far against the trials, some methods in each figure."""
    figures = []
    for metric in dict.fromkeys(method.metric for method in found.methods):
        methods = [method for method in found.methods if method.metric == metric]
        for first in range(0, len(methods), _CURVES):
            figures.append(_curves(metric, methods[first : first + _CURVES], first // _CURVES + 1))
    return figures


def _curves(metric: str, methods: Sequence[TunedMethod], number: int) -> Figure:
    figure = style.blank()
    axes = figure.subplots()
    for index, method in enumerate(methods):
        points = [(n, value) for n, value in enumerate(method.curve(), start=1) if value is not None]
        axes.step([n for n, _ in points], [v for _, v in points], where="post", label=method.label, **style.line(index))
    axes.set_xlabel("trials")
    axes.set_ylabel(f"best validation {metric.replace('_', ' ')}")
    style.whole_numbers(axes.xaxis)
    style.legend(figure, axes)
    caption = (
        f"Best {metric.replace('_', ' ')} on the validation rows so far. A curve that still rises at its end would "
        "gain from more trials; a flat one has had enough."
    )
    return Figure(name=f"budget-{metric}-{number}", title=f"Budget curves {number}", caption=caption, figure=figure)
