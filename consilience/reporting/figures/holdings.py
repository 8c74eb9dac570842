"""Who holds what: rows of every class at every client."""

from __future__ import annotations

from typing import Any

import numpy as np

from consilience.reporting import style
from consilience.reporting.figures.weights import height, name_clients
from consilience.reporting.runs import RunData
from consilience.reporting.style import Figure

_MOST_CLASSES_NAMED = 16


def partition(run: RunData) -> list[Figure]:
    """Client x class, and how many rows each client has."""
    counts, rows = run.federation.get("class_counts"), run.federation.get("train_rows")
    pictures = []
    if isinstance(counts, list) and counts:
        pictures.append(_classes(run, np.array(counts, dtype=np.float64)))
    if isinstance(rows, list) and len(rows) > 1:
        pictures.append(_sizes(run, np.array(rows)))
    return pictures


def _classes(run: RunData, counts: np.ndarray) -> Figure:
    sizes = counts.sum(1, keepdims=True)
    shares = np.divide(counts, sizes, out=np.full(counts.shape, np.nan), where=sizes > 0)  # [K, C]
    figure = style.blank(height=height(len(counts)))
    axes = figure.subplots()
    image = axes.imshow(shares, aspect="auto", cmap=style.heat(), interpolation="none", vmin=0)
    axes.grid(False)
    axes.set_facecolor(style.EMPTY)
    axes.set(xlabel="class", ylabel="client")
    labels = [str(label) for label in run.federation.get("labels") or []]
    if len(labels) == counts.shape[1] <= _MOST_CLASSES_NAMED:
        longest = max(map(len, labels))
        turned: dict[str, Any] = {"rotation": 40, "ha": "right"} if longest > 3 else {}
        axes.set_xticks(range(len(labels)), [x if len(x) <= 12 else f"{x[:11]}…" for x in labels], fontsize=8, **turned)
    else:
        style.whole_numbers(axes.xaxis)
    name_clients(axes.yaxis, run)
    figure.colorbar(image, ax=axes, label="share of the client's rows", pad=0.02)
    caption = "Training rows: a line of one colour is a client with all classes alike."
    return Figure(name="partition", title="Who holds what", caption=caption, figure=figure)


def _sizes(run: RunData, rows: np.ndarray) -> Figure:
    figure = style.blank()
    axes = figure.subplots()
    axes.bar(range(len(rows)), rows, width=0.8 if len(rows) <= 200 else 1.0, color=style.LINES[0], lw=0)
    axes.set(xlabel="client", ylabel="training rows")
    axes.grid(axis="x", visible=False)
    name_clients(axes.xaxis, run)
    longest = max((len(name) for name in run.client_names()), default=0)
    if longest > 3:
        axes.tick_params(axis="x", labelrotation=40)
    total = int(rows.sum())
    caption = f"{total:,} rows at {len(rows)} clients; the largest has {rows.max():,}, the smallest {rows.min():,}."
    return Figure(name="rows", title="Rows per client", caption=caption, figure=figure)
