"""The figures of a comparison: every seed of every method, and differences from the baseline."""

from __future__ import annotations

from typing import Any

from consilience.compare.plan import Comparison
from consilience.compare.results import MethodResult, Results
from consilience.core.metrics import SHARE
from consilience.reporting import style
from consilience.reporting.style import Figure
from consilience.runs.names import plain

_LONGEST = 22  # characters of a label beside a figure


def figures(comparison: Comparison, results: Results) -> list[Figure]:
    """Those there are finished runs for; to be called within `style.drawing()`."""
    found = [_values(results), _differences(comparison, results)]
    return [figure for figure in found if figure is not None]


def _values(results: Results) -> Figure | None:
    main, scale = results.main, _scale(results)
    ordered = [method for method in _ordered(results) if main.key in method.qualities]
    if not ordered:
        return None
    figure = style.blank(height=_height(len(ordered)))
    axes = figure.subplots()
    for place, method in enumerate(ordered):
        own = [cell for cell in results.cells if cell.method == method.method.label and main.key in cell.qualities]
        seeds = [scale * cell.qualities[main.key] for cell in own]
        mean = scale * method.qualities[main.key].mean
        axes.scatter(seeds, [place] * len(seeds), s=16, color=style.LINES[0], alpha=0.6, lw=0)
        axes.plot([mean, mean], [place - 0.3, place + 0.3], color=style.INK, lw=1.6)
    _name(axes, ordered)
    axes.set_xlabel(_axis(results))
    caption = (
        f"{main.title[:1].upper()}{main.title[1:]} after the last round: each dot is one seed, each bar the mean of a "
        f"method; the best mean is on top, and {main.better} is better. Dots that overlap between methods mean that "
        "the choice of the seed matters as much as that of the method."
    )
    return Figure(name="values", title="Every seed of every method", caption=caption, figure=figure)


def _differences(comparison: Comparison, results: Results) -> Figure | None:
    main, scale = results.main, _scale(results)
    tested = [(m, test) for m in _ordered(results) if (test := m.against.get(main.key)) and test.mean is not None]
    if not tested:
        return None
    figure = style.blank(height=_height(len(tested)))
    axes = figure.subplots()
    axes.axvline(0, color=style.SOFT, lw=0.9, ls="--")
    for place, (_, test) in enumerate(tested):
        if test.low is not None and test.high is not None:
            axes.plot([scale * test.low, scale * test.high], [place, place], color=style.LINES[0], lw=1.6)
        axes.scatter([scale * (test.mean or 0.0)], [place], s=22, color=style.LINES[0], zorder=3, lw=0)
    _name(axes, [method for method, _ in tested])
    unit = " (points)" if main.unit == SHARE else f" ({main.unit})" if main.unit else ""
    axes.set_xlabel(f"{main.title} minus that of the baseline{unit}")
    side = "left" if main.better == "lower" else "right"
    caption = (
        f"Mean difference from {plain(comparison.baseline, most=40)}, paired by seed, with its 95 % interval by "
        f"Student's t; dashed: no difference. A method is better if its whole interval lies {side} of the dashed line; "
        "an interval that crosses it shows nothing."
    )
    title = "Difference from the baseline"
    return Figure(name="differences", title=title, caption=caption, figure=figure)


def _ordered(results: Results) -> list[MethodResult]:
    """The best mean first; methods without a value last."""
    main = results.main
    sign = 1 if main.better == "lower" else -1
    known = [method for method in results.methods if main.key in method.qualities]
    rest = [method for method in results.methods if main.key not in method.qualities]
    return sorted(known, key=lambda method: sign * method.qualities[main.key].mean) + rest


def _name(axes: Any, methods: list[MethodResult]) -> None:
    labels = [plain(method.method.label, most=60) for method in methods]
    shown = [label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…" for label in labels]
    axes.set_yticks(range(len(shown)), shown, fontsize=8)
    axes.set_ylim(len(shown) - 0.45, -0.55)
    axes.grid(axis="y", visible=False)


def _axis(results: Results) -> str:
    main = results.main
    unit = "%" if main.unit == SHARE else main.unit
    return main.title + (f" ({unit})" if unit else "")


def _scale(results: Results) -> float:
    return 100.0 if results.main.unit == SHARE else 1.0


def _height(count: int) -> float:
    return max(1.9, 0.75 + 0.26 * count)
