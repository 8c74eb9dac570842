"""The diagnosis as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from consilience.diagnose.advice import Advice
from consilience.diagnose.diagnosis import Diagnosis
from consilience.diagnose.drawings import figures
from consilience.diagnose.text import lines
from consilience.reporting import style
from consilience.reporting.page import Fact, render
from consilience.reporting.report import NO_FIGURES, is_possible
from consilience.reporting.tables import Table


def page(of: Diagnosis, advice: Sequence[Advice]) -> str:
    """The whole file; without figures where nothing is installed that draws them."""
    if not is_possible():
        return render("diagnosis.html", **_values(of, advice), pictures=[], no_figures=NO_FIGURES)
    with style.drawing():
        return render("diagnosis.html", **_values(of, advice), pictures=figures(of), no_figures="")


def _values(of: Diagnosis, advice: Sequence[Advice]) -> dict[str, Any]:
    rows = tuple((line.what, line.found, line.chance or "—", line.means) for line in lines(of))
    head = ("measured", "found", "by chance", "meaning")
    return {
        "title": f"{of.title}: diagnosis",
        "heading": f"Heterogeneity report: {of.title} ({len(of.names)} clients)",
        "cards": _facts(of),
        "measured": Table(head=head, lines=rows, words=frozenset({3})),
        "advice": advice,
        "data": of.table(),
        "made_by": "consilience diagnose",
    }


def _facts(of: Diagnosis) -> list[Fact]:
    shift = "n/a" if of.features is None else f"{of.features.share:.3f}"
    chance = "" if of.features is None else f"by chance {of.features.chance:.3f}"
    return [
        Fact("label skew", f"{of.labels.mean:.3f}", f"by chance {of.labels.chance_mean:.3f}"),
        Fact("quantity skew (Gini)", f"{of.quantity.gini:.2f}", "0: all clients have equally many rows"),
        Fact("feature shift", shift, chance),
        Fact("gradient dissimilarity B", f"{of.start.b:.2f}", f"by chance {of.start.chance:.2f}"),
        Fact("work, most : fewest", f"{of.effort.epochs_ratio:.3g}", "local epochs"),
    ]
