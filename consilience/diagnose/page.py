"""The diagnosis as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from consilience.diagnose.advice import Advice
from consilience.diagnose.diagnosis import Diagnosis
from consilience.diagnose.text import lines
from consilience.reporting import style
from consilience.reporting.charts import CLIENT, Axis, Figure, Heat, Scale
from consilience.reporting.figures.by_client import bars, classes, clients
from consilience.reporting.figures.holdings import LABELS_CAPTION, shares
from consilience.reporting.page import Fact, render
from consilience.reporting.report import NO_FIGURES, is_possible
from consilience.reporting.tables import Table
from consilience.runs.names import plain


def figures(of: Diagnosis) -> list[Figure]:
    """All figures for which there are data; call it within `style.drawing()`."""
    names = [plain(name, most=24) for name in of.names]
    found = [_labels(of, names), _sizes(of, names), _label_distances(of, names)]
    if of.features is not None:
        found.append(_feature_distances(of.features.distances, names))
    found += [
        _cosines(of, of.start.cosines, names, "at the start", "gradients_start"),
        _cosines(of, of.later.cosines, names, f"after {of.later_round} rounds", "gradients_later"),
        _similarity(of, names),
        _steps(of, names),
    ]
    return [*found, _seconds(of, names)] if of.effort.seconds.max(initial=0) > 0 else found


def _labels(of: Diagnosis, names: list[str]) -> Figure:
    counts = of.labels.counts
    binned = of.labels.binned
    across = (
        Axis("tenth of the targets (from low to high)", first=1)
        if binned
        else classes([str(c) for c in range(counts.shape[1])], counts.shape[1])
    )
    scale = Scale("share of the client's rows", low=0, high=1)
    chart = Heat(values=shares(counts), down=clients(names), across=across, scale=scale)
    caption = LABELS_CAPTION.replace("class", "tenth of the targets") if binned else LABELS_CAPTION
    title = "Targets by client" if binned else "Labels by client"
    return Figure(name="labels", title=title, caption=caption, chart=chart)


def _sizes(of: Diagnosis, names: list[str]) -> Figure:
    sizes = of.quantity.sizes.astype(float)
    chart = bars(sizes, across=clients(names), up="training rows", line=("mean", float(sizes.mean())))
    caption = (
        "Training rows of each client; dashed: the mean. Bars of equal height mean no quantity skew. A few high bars "
        "mean that an average weighted by rows follows those clients."
    )
    return Figure(name="rows", title="Rows per client", caption=caption, chart=chart)


def _label_distances(of: Diagnosis, names: list[str]) -> Figure:
    level = ("mean by chance", of.labels.chance_mean)
    chart = bars(of.labels.total_variation, across=clients(names), up="total variation (0 to 1)", line=level)
    caption = (
        "Distance between each client's labels and those of all clients: 0 means the same distribution, 1 means no "
        "common label. Dashed: what clients of these sizes show by chance. Bars near the line show no label skew; bars "
        "far above it are clients with labels of their own."
    )
    return Figure(name="label_distances", title="Label skew of each client", caption=caption, chart=chart)


def _feature_distances(distances: np.ndarray, names: list[str]) -> Figure:
    chart = bars(distances, across=clients(names), up="distance (standard deviations)")
    caption = (
        "Distance between each client's mean features and those of all clients, in standard deviations of rows within "
        "clients. Low, even bars mean that inputs come from one distribution; a high bar is a client whose inputs look "
        "different, or a small client, whose mean varies by chance."
    )
    return Figure(name="feature_distances", title="Feature shift of each client", caption=caption, chart=chart)


def _cosines(of: Diagnosis, cosines: np.ndarray, names: list[str], when: str, name: str) -> Figure:
    axis = _probed(of, names)
    scale = Scale("cosine (-1 to 1)", low=-1, high=1, diverging=True)
    chart = Heat(values=cosines, down=axis, across=axis, scale=scale)
    caption = (
        f"Cosine between the gradients of two clients {when}: rows and columns are clients. Blue (1) means that both "
        "pull the model the same way, white (0) that they are unrelated, red (-1) that they pull against each other. "
        "All blue is easy for FedAvg; red cells are conflicts, and blue blocks are groups of similar clients."
    )
    return Figure(name=name, title=f"Gradients {when}", caption=caption, chart=chart)


def _similarity(of: Diagnosis, names: list[str]) -> Figure:
    axis = _probed(of, names)
    scale = Scale("linear CKA (at most 1)", high=1)
    chart = Heat(values=of.similarity.matrix, down=axis, across=axis, scale=scale)
    caption = (
        f"Similarity of the models that two clients train in one round ({of.local_epochs:g} local epochs) from the "
        "same model: 1 means the same features, up to a rotation. The scale starts at the least similar pair, so read "
        f"its numbers: values near those by chance ({of.similarity.chance:.3f} in the mean) are good."
    )
    return Figure(name="similarity", title="Similarity of client models", caption=caption, chart=chart)


def _steps(of: Diagnosis, names: list[str]) -> Figure:
    chart = bars(of.effort.steps, across=clients(names), up="local steps in a round")
    caption = (
        "Local steps of each client in a round, mean over rounds, when all clients are given the same work. Equal bars "
        "mean equal work; a client with many more steps than others pulls the average towards its own data."
    )
    return Figure(name="steps", title="Work of each client", caption=caption, chart=chart)


def _seconds(of: Diagnosis, names: list[str]) -> Figure:
    seconds = of.effort.seconds
    chart = bars(seconds, across=clients(names), up="simulated time (s)", line=("median", float(np.median(seconds))))
    caption = (
        "Simulated time from sending a client its model to its reply. Equal bars are good: a synchronous round lasts "
        "as long as its slowest client, so one high bar makes all others wait."
    )
    return Figure(name="seconds", title="Time to a reply", caption=caption, chart=chart)


def _probed(of: Diagnosis, names: list[str]) -> Axis:
    """The clients whose gradients and models were compared."""
    return clients(names) if len(of.probed) == len(names) else Axis("client", [names[k] for k in of.probed], of=CLIENT)


def page(of: Diagnosis, advice: Sequence[Advice]) -> str:
    """The HTML text; without figures if matplotlib is not installed."""
    if not is_possible():
        return render("diagnosis.html", **_values(of, advice), pictures=[], no_figures=NO_FIGURES)
    with style.drawing():
        found = figures(of)
        return render("diagnosis.html", **_values(of, advice), pictures=found, figures=found, no_figures="")


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
