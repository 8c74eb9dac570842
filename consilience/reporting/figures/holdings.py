"""Rows of every class at every client."""

from __future__ import annotations

import numpy as np

from consilience.reporting.charts import Figure, Heat, Scale
from consilience.reporting.figures.by_client import bars, classes, clients
from consilience.reporting.runs import RunData

LABELS_CAPTION = (
    "Each row is one client, each column one class; the colour is the share of the client's rows in that class. "
    "An even row means balanced classes; rows that look alike mean little label skew; a few bright cells in a row mean "
    "that the client knows only those classes. An empty row is a client without rows."
)


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
    labels = [str(label) for label in run.federation.get("labels") or []]
    chart = Heat(
        values=shares(counts),
        down=clients(run.client_names()),
        across=classes(labels, counts.shape[1]),
        scale=Scale("share of the client's rows", low=0),
    )
    return Figure(name="partition", title="Labels by client", caption=LABELS_CAPTION, chart=chart)


def shares(counts: np.ndarray) -> np.ndarray:
    """[K, C] of each client's rows in each class; NaN without rows."""
    sizes = counts.sum(1, keepdims=True).astype(np.float64)
    return np.divide(counts, sizes, out=np.full(counts.shape, np.nan), where=sizes > 0)


def _sizes(run: RunData, rows: np.ndarray) -> Figure:
    chart = bars(rows, across=clients(run.client_names()), up="training rows", line=("mean", float(rows.mean())))
    caption = (
        f"Training rows of each client: {int(rows.sum()):,} in all, between {rows.min():,} and {rows.max():,} at a "
        "client. Bars of equal height mean no quantity skew; clients far below the line can contribute little."
    )
    return Figure(name="rows", title="Rows per client", caption=caption, chart=chart)
