"""The report of a study: a table of the methods' best options, and curves of the best value over trials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consilience.compare.tables import markdown, study
from consilience.compare.tuned import TunedMethod, TuningResult
from consilience.reporting import charts, page, report, style
from consilience.reporting.charts import METHOD, Axis, Figure, Lines, Series
from consilience.reporting.tables import Table
from consilience.runs.disk import replace_file

_CURVES = 8  # in one figure: more are not distinguishable


def write(found: TuningResult, folder: Path) -> list[Path]:
    """tuned.md, and with Matplotlib tuned.html with the curves."""
    table = study(found)
    replace_file(folder / "tuned.md", markdown(folder.name, [table], []).encode())
    if not report.is_possible():
        return [folder / "tuned.md"]
    pictures = curves(found)
    with style.drawing():
        text = page.render(
            "tuning.html",
            title=f"Tuning: {folder.name}",
            cards=[
                page.Fact("methods", str(len(found.methods))),
                page.Fact("trials of each method", str(found.trials), f"{found.sampler}, pruning: {found.pruner}"),
                page.Fact("validation", f"{found.validation:.0%}", "of each client's training rows"),
                page.Fact("seeds of a trial", str(len(found.seeds)), ", ".join(map(str, found.seeds))),
            ],
            best=Table(head=table.head, lines=table.rows),
            reading=table.reading,
            pictures=pictures,
            figures=pictures,
            made_by="consilience tune",
        )
        replace_file(folder / "tuned.html", text.encode())
    return [folder / "tuned.md", folder / "tuned.html"]


def curves(found: TuningResult) -> list[Figure]:
    """The best validation value so far against the trials, some methods in each figure."""
    figures = []
    for metric in dict.fromkeys(method.metric for method in found.methods):
        methods = [method for method in found.methods if method.metric == metric]
        for first in range(0, len(methods), _CURVES):
            figures.append(_curves(metric, methods[first : first + _CURVES], first // _CURVES + 1, len(methods)))
    return figures


def _curves(metric: str, methods: Sequence[TunedMethod], number: int, of: int) -> Figure:
    series = []
    for index, method in enumerate(methods):
        points = [(n, value) for n, value in enumerate(method.curve(), start=1) if value is not None]
        x, y = [n for n, _ in points], [value for _, value in points]
        link = charts.link(METHOD, method.label)
        series.append(Series(name=method.label, x=x, y=y, look=index, form="step", link=link))
    words = metric.replace("_", " ")
    chart = Lines(series=series, x=Axis("trial", unit="whole"), y=Axis(f"best validation {words}"))
    caption = (
        f"Best {words} on the validation rows so far; the curve is flat while nothing better is found. A curve that "
        "still rises at its end would gain from more trials; a flat one has had enough."
    )
    title = f"Best {words} over trials" + (f", part {number}" if of > _CURVES else "")
    return Figure(name=f"budget-{metric}-{number}", title=title, caption=caption, chart=chart)
