"""The comparison as tables: on the terminal, as Markdown and as CSV, from the same text."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from consilience.compare.paired import Paired
from consilience.compare.plan import Comparison
from consilience.compare.results import BUDGET, TO_TARGET, MethodResult, Quality, Results, Spread
from consilience.compare.tuned import TunedMethod, TuningResult
from consilience.core.metrics import SHARE
from consilience.reporting.wide_table import WideTable

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # first characters that a spreadsheet takes for a formula


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """One table: a title, a head and rows of text, and how to read it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    reading: str = ""


def sheets(comparison: Comparison, results: Results) -> list[TextTable]:
    """Tables of quality, paired tests, cost and time to the target."""
    main = results.main
    ordered = sorted(results.methods, key=lambda found: _rank(found, main))
    found = [_quality(ordered, results.qualities), _tests(comparison, ordered, main), _budget(ordered)]
    if comparison.target is not None:
        found.append(_target(comparison, ordered, results.qualities[0].title))
    if comparison.tuned is not None:
        found.append(study(comparison.tuned, [method.label for method in comparison.methods]))
    return [sheet for sheet in found if sheet.rows]


def on_screen(found: Sequence[TextTable], notes: Sequence[str]) -> RenderableType:
    """The sheets for a terminal."""
    parts: list[RenderableType] = []
    for sheet in found:
        parts += [Text(sheet.title, style="italic"), WideTable(heads=sheet.head, lines=sheet.rows, first="left"), ""]
    return Group(*parts, *(Text(f"note: {note}") for note in notes))


def markdown(name: str, found: Sequence[TextTable], notes: Sequence[str]) -> str:
    """The sheets as a page."""
    lines = [f"# {name}", ""]
    for sheet in found:
        lines += [f"## {sheet.title}", "", _line(sheet.head), f"|{'---|' * len(sheet.head)}"]
        lines += [*map(_line, sheet.rows), ""]
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def methods_csv(results: Results) -> str:
    """One line per method: means and standard deviations of all metrics and costs."""
    keys = [*(quality.key for quality in results.qualities), *BUDGET]
    head = ["method", "seeds", "diverged", "reached"]
    head += [f"{key}_{part}" for key in (*keys, *TO_TARGET) for part in ("mean", "deviation")]
    rows = []
    for found in results.methods:
        spreads = {**found.qualities, **found.budget, **found.to_target}
        numbers = [
            getattr(spreads.get(key), part, None) for key in (*keys, *TO_TARGET) for part in ("mean", "deviation")
        ]
        rows.append([found.method.label, found.finished, found.diverged, found.reached, *numbers])
    return _csv(head, rows)


def cells_csv(results: Results) -> str:
    """One line per run."""
    keys = [*(quality.key for quality in results.qualities), *BUDGET, *TO_TARGET]
    rows = []
    for cell in results.cells:
        numbers = {**cell.qualities, **cell.budget, **(cell.to_target or {})}
        rows.append([cell.method, cell.seed, cell.status, *(numbers.get(key) for key in keys)])
    return _csv(["method", "seed", "status", *keys], rows)


def _quality(methods: Sequence[MethodResult], qualities: Sequence[Quality]) -> TextTable:
    known = [q for q in qualities if q.brief and any(q.key in found.qualities for found in methods)]
    rows = []
    for found in methods:
        seeds = str(found.finished) + (f" ({found.diverged} diverged)" if found.diverged else "")
        star = "*" if found.personal else ""
        cells = [spread(found.qualities.get(q.key), q) + (star if q.of_clients else "") for q in known]
        rows.append((found.method.label, seeds, *cells))
    shares = [q.unit == SHARE for q in known]
    unit = " in %" if all(shares) else " (shares in %)" if any(shares) else ""
    title = f"Quality after the last round{unit}: mean ± standard deviation over seeds" + (
        "; * of clients' own models" if any(found.personal for found in methods) else ""
    )
    reading = (
        "The global model on all test rows. “Best” is its best value over the rounds, selected on those rows: do not "
        "report it alone. “Clients” and “worst tenth”: on each client's own test rows."
    )
    return TextTable(
        title=title, head=("method", "seeds", *(q.title for q in known)), rows=tuple(rows), reading=reading
    )


def _tests(comparison: Comparison, methods: Sequence[MethodResult], main: Quality) -> TextTable:
    rows = []
    for found in methods:
        test = found.against.get(main.key)
        if test is not None:
            rows.append((found.method.label, str(test.n), *_tested(test, main)))
    points = " in points" if main.unit == SHARE else ""
    better = "below 0 is better" if main.better == "lower" else "above 0 is better"
    title = main.title[:1].upper() + main.title[1:]
    return TextTable(
        title=f"{title} minus that of {comparison.baseline}{points}, paired by seed ({better})",
        head=("method", "n", "difference", "95 % interval", "p (t)", "p (exact)", "p (sign)", "shown"),
        rows=tuple(rows),
        reading="Difference: mean over the n seeds, with its interval by Student's t. p: of the paired t test, the "
        "exact sign-flip test and the sign test, two-sided. Shown: the conclusion at the 5 % level; “not shown” does "
        "not mean equal.",
    )


def _tested(test: Paired, quality: Quality) -> tuple[str, ...]:
    scale, digits = _scale(quality)

    def number(value: float | None) -> str:
        return "n/a" if value is None else f"{scale * value:+.{digits}f}"

    interval = "n/a" if test.low is None else f"{number(test.low)} .. {number(test.high)}"
    chances = [_chance(p) for p in (test.p_t, test.p_permutation, test.p_sign)]
    return number(test.mean), interval, *chances, _verdict(test, quality)


def _verdict(test: Paired, quality: Quality) -> str:
    good, bad = ("smaller", "larger") if quality.better == "lower" else ("larger", "smaller")
    return test.verdict.replace(good, "better").replace(bad, "worse")


def _budget(methods: Sequence[MethodResult]) -> TextTable:
    titles = {
        "rounds": "rounds",
        "replies": "replies",
        "client_epochs": "client epochs",
        "megabytes_up": "MB up",
        "megabytes_down": "MB down",
        "simulated_seconds": "simulated s",
        "wall_seconds": "wall s",
    }
    known = [key for key in BUDGET if any(found.budget.get(key) and found.budget[key].mean for found in methods)]
    rows = [(found.method.label, *(_amount(found.budget.get(key)) for key in known)) for found in methods]
    return TextTable(
        title="Budget used: mean over seeds", head=("method", *(titles[key] for key in known)), rows=tuple(rows)
    )


def _target(comparison: Comparison, methods: Sequence[MethodResult], main: str) -> TextTable:
    timed = any(found.to_target.get("target_seconds") and found.to_target["target_seconds"].mean for found in methods)
    keys = TO_TARGET if timed else TO_TARGET[:2]
    rows = []
    for found in methods:
        cells = [_amount(found.to_target[key], spread=True) if key in found.to_target else "n/a" for key in keys]
        rows.append((found.method.label, f"{found.reached} of {found.finished}", *cells))
    return TextTable(
        title=f"To {main} {comparison.target:g}: mean ± standard deviation over the seeds that reached it",
        head=("method", "seeds that did", "rounds", "MB both ways", "simulated s")[: 2 + len(keys)],
        rows=tuple(rows),
        reading="Means are over the seeds that reached it: a method that did so on one seed can look fast.",
    )


def study(found: TuningResult, labels: Sequence[str] = ()) -> TextTable:
    """How methods were tuned, the best validation value first."""
    head = ("method", "validation", "metric", "first trial", "trials", "pruned", "failed", "best options")
    methods = [method for method in found.methods if not labels or method.label in labels]
    ordered = sorted(methods, key=lambda method: (method.metric, _tuned_rank(method)))
    lines = tuple(_tuned_line(method) for method in ordered)
    reading = (
        "Validation: the best value on the validation rows; first trial: with the options of an untuned run. Pruned "
        "trials were stopped early; failed ones diverged, or had options that the method refuses."
    )
    return TextTable(title=f"Tuning: {found.budget}", head=head, rows=lines, reading=reading)


def _tuned_rank(method: TunedMethod) -> float:
    if method.best is None:
        return float("inf")
    return -method.best if method.better == "higher" else method.best


def _tuned_line(method: TunedMethod) -> tuple[str, ...]:
    first = method.trials[0].value if method.trials and method.trials[0].state == "complete" else None
    searched = {key: value for key, value in (method.options or {}).items() if key in method.ranges}
    return (
        method.label,
        "n/a" if method.best is None else f"{method.best:.4f}",
        method.metric,
        "n/a" if first is None else f"{first:.4f}",
        *(str(count) for count in (len(method.trials), method.counted("pruned"), method.counted("failed"))),
        ", ".join(f"{key} = {value:.3g}" for key, value in searched.items()) or "none",
    )


def spread(found: Spread | None, quality: Quality) -> str:
    """'91.2 ± 0.3', shares in percent."""
    if found is None:
        return "n/a"
    scale, digits = _scale(quality)
    deviation = "" if found.deviation is None else f" ± {scale * found.deviation:.{digits}f}"
    return f"{scale * found.mean:.{digits}f}{deviation}"


def _scale(quality: Quality) -> tuple[float, int]:
    return (100.0, 1) if quality.unit == SHARE else (1.0, 4)


def _amount(found: Spread | None, *, spread: bool = False) -> str:
    if found is None:
        return "n/a"
    digits = 0 if found.mean >= 100 or float(found.mean).is_integer() else 1
    deviation = f" ± {found.deviation:.{max(1, digits)}f}" if spread and found.deviation is not None else ""
    return f"{found.mean:,.{digits}f}{deviation}"


def _chance(p: float | None) -> str:
    return "n/a" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _rank(found: MethodResult, main: Quality) -> tuple[bool, float]:
    known = found.qualities.get(main.key)
    if known is None:
        return True, 0.0
    return False, known.mean if main.better == "lower" else -known.mean


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _csv(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([[_csv_cell(value) for value in row] for row in rows])
    return text.getvalue()


def _csv_cell(value: object) -> object:
    """Numbers as they are; text that a spreadsheet would run as a formula gets an apostrophe in front."""
    if isinstance(value, str) and value.startswith(FORMULA):
        return "'" + value
    return "" if value is None else value
