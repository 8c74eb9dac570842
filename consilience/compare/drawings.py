"""The figures of a comparison: learning curves, every seed of every method, and differences from the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from consilience.compare.plan import Comparison
from consilience.compare.results import MethodResult, Results
from consilience.core.metrics import SHARE
from consilience.reporting import charts
from consilience.reporting.charts import METHOD, Axis, Chart, Figure, Lines, Strip, Strips
from consilience.reporting.figures import curves
from consilience.reporting.groups import grouped
from consilience.reporting.runs import find, folders
from consilience.runs.names import plain


def figures(comparison: Comparison, results: Results) -> list[Figure]:
    """The figures for which there are finished runs; call it within `style.drawing()`."""
    found = [_values(results), _differences(comparison, results), *_curves(comparison, results)]
    return [figure for figure in found if figure is not None]


def _curves(comparison: Comparison, results: Results) -> list[Figure]:
    """The main metric over rounds, against traffic and against time, in the methods' own colours."""
    if not any(folders(comparison.folder)):
        return []
    runs, _ = find([comparison.folder], tolerant=True)
    groups = [group for group in grouped(runs) if any(run.rows for run in group.runs)]
    methods = {_name(method): method for method in results.methods}
    own = {charts.link(METHOD, g.label): methods[g.first.label] for g in groups if g.first.label in methods}
    main = results.main.key
    shown = [figure for figure in curves.over_rounds(groups) if figure.name == main]
    shown += [figure for figure in curves.against_costs(groups) if figure.name.startswith(f"{main}_against_")]
    return [replace(figure, chart=_coloured(figure.chart, results, own)) for figure in shown]


def _coloured(chart: Chart, results: Results, own: Mapping[str, MethodResult]) -> Chart:
    """Curves with the colour and the link that their method has in the other figures."""
    if not isinstance(chart, Lines):
        return chart
    found = []
    for series in chart.series:
        if method := own.get(series.link):
            series = replace(series, look=_look(results, method), link=charts.link(METHOD, method.method.label))
        found.append(series)
    return replace(chart, series=found)


def _values(results: Results) -> Figure | None:
    main, scale = results.main, _scale(results)
    ordered = [method for method in _ordered(results) if main.key in method.qualities]
    if not ordered:
        return None
    strips = []
    for method in ordered:
        label = method.method.label
        own = [cell for cell in results.cells if cell.method == label and main.key in cell.qualities]
        seeds, mean = [scale * cell.qualities[main.key] for cell in own], scale * method.qualities[main.key].mean
        names = [f"seed {cell.seed}" for cell in own]
        link, look = charts.link(METHOD, label), _look(results, method)
        strips.append(Strip(_name(method), seeds, mean, link=link, look=look, names=names))
    chart = Strips(strips=strips, x=Axis(_axis(results)), words=("mean", ""))
    caption = (
        f"{main.title[:1].upper()}{main.title[1:]} after the last round: each dot is one seed, each bar the mean of a "
        f"method; the best mean is on top, and {main.better} is better. Dots that overlap between methods mean that "
        "the choice of the seed matters as much as that of the method."
    )
    return Figure(name="values", title="Every seed of every method", caption=caption, chart=chart)


def _differences(comparison: Comparison, results: Results) -> Figure | None:
    main, scale = results.main, _scale(results)
    tested = [(m, test) for m in _ordered(results) if (test := m.against.get(main.key)) and test.mean is not None]
    if not tested:
        return None
    strips = []
    for method, test in tested:
        known = test.low is not None and test.high is not None
        span = (scale * (test.low or 0.0), scale * (test.high or 0.0)) if known else None
        link, look, mean = charts.link(METHOD, method.method.label), _look(results, method), scale * (test.mean or 0.0)
        strips.append(Strip(_name(method), [mean], None, span, link=link, look=look, names=["mean"]))
    unit = " (points)" if main.unit == SHARE else f" ({main.unit})" if main.unit else ""
    axis = Axis(f"{main.title} minus that of the baseline{unit}")
    chart = Strips(strips=strips, x=axis, zero=True, words=("", "95 % interval"))
    side = "left" if main.better == "lower" else "right"
    caption = (
        f"Mean difference from {plain(comparison.baseline, most=40)}, paired by seed, with its 95 % interval by "
        f"Student's t; dashed: no difference. A method is better if its whole interval lies {side} of the dashed line; "
        "an interval that crosses it shows nothing."
    )
    title = "Difference from the baseline"
    return Figure(name="differences", title=title, caption=caption, chart=chart)


def _ordered(results: Results) -> list[MethodResult]:
    """The best mean first; methods without a value last."""
    main = results.main
    sign = 1 if main.better == "lower" else -1
    known = [method for method in results.methods if main.key in method.qualities]
    rest = [method for method in results.methods if main.key not in method.qualities]
    return sorted(known, key=lambda method: sign * method.qualities[main.key].mean) + rest


def _name(method: MethodResult) -> str:
    return plain(method.method.label, most=60)


def _look(results: Results, method: MethodResult) -> int:
    """The number of its colour: the same in both figures, whatever their order."""
    return results.methods.index(method)


def _axis(results: Results) -> str:
    main = results.main
    unit = "%" if main.unit == SHARE else main.unit
    return main.title + (f" ({unit})" if unit else "")


def _scale(results: Results) -> float:
    return 100.0 if results.main.unit == SHARE else 1.0
