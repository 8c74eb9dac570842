"""Checks test results that clients report about their own rows: impossible values are refused."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Cohort
from consilience.core.metrics import SHARE, MeanOf, Metric, Metrics
from consilience.core.refusal import Refusal, Refused, contained, tally
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.task.kinds import LOSSES

REASON = "implausible"
ROUNDING = 1e-6  # of sums, relative to the rows
MOST = (
    1000.0  # a sum per row, where nothing else bounds it, as a multiple of the clients' median (of 1, if that is more)
)
MOST_ENTRIES = 10.0  # the same of the entries of a row (tokens, pixels), of which the server knows no number


def plausible(said: Cohort, task: Task, rows: np.ndarray) -> Cohort:
    """The plausible answers to a test; the others are refused by name. rows: [K] test rows of every client."""
    if not len(said):
        return said
    refusals = []
    reply = tree.map_leaves(lambda leaf: leaf.detach().to("cpu", torch.float64), said.reply)
    for row, client in enumerate(said.ids.tolist()):
        try:
            with contained():
                _refuse(task, tree.rows(reply, row), int(rows[client]))
        except Refused as problem:
            refusals.append(Refused(REASON, key=problem.key, detail=problem.detail).by(client))
    said = _without(said, refusals)
    return _without(said, _unlike_the_others(said, task.metrics, rows))


def _without(said: Cohort, refusals: list[Refusal]) -> Cohort:
    if not refusals:
        return said
    kept = ~np.isin(said.ids, [refusal.client for refusal in refusals])
    return said.only(kept, **tally(refusals)).refusing(refusals)


def _unlike_the_others(said: Cohort, metrics: Metrics, rows: np.ndarray) -> list[Refusal]:
    """Clients whose sums per row are far above those of the others: one must not decide a mean over all alone."""
    refusals: dict[int, Refusal] = {}
    held = np.maximum(1, rows[said.ids])
    for path, leaf in tree.flatten(said.reply).items():
        each = leaf.detach().abs().reshape(len(leaf), -1).amax(1).to("cpu", torch.float64).numpy() / held  # [m]
        entries = metrics.entries is not None and path.endswith("/count") and not path.startswith("loss/")
        median = np.sort(each)[(len(each) - 1) // 2] if len(each) else 0.0
        most = (MOST_ENTRIES if entries else MOST) * max(1.0, median)
        for row in np.flatnonzero(each > most):
            detail = f"{each[row]:g} for each row, where the clients' median is {median:g}"
            client = int(said.ids[row])
            refusals.setdefault(client, Refusal(client=client, reason=REASON, key=path, detail=detail))
    return list(refusals.values())


def _refuse(task: Task, sums: Tree, rows: int) -> None:
    """`Refused` if one client's sums cannot be those of so many rows."""
    metrics: Metrics = task.metrics
    for path, leaf in tree.flatten(sums).items():
        if not bool(leaf.isfinite().all()):
            raise Refused(REASON, key=path, detail="a sum that is not finite")
    counted = float(sums["loss"]["count"])
    if counted != rows:
        raise Refused(REASON, key="loss", detail=f"{counted:g} rows, where it has {rows}")
    if task.loss_name in LOSSES and float(sums["loss"]["total"]) < 0:
        raise Refused(REASON, key="loss", detail="a negative loss")
    entries = _entries(metrics, sums, rows)
    for metric in metrics.metrics[1:]:
        mine = sums.get(metrics.part_of[metric.key])
        if mine is None:
            continue
        if isinstance(metric.sums, MeanOf):
            _refuse_mean(metric, mine["total"], mine["count"], rows if metrics.entries is None else None)
        what = metric.implausible(mine, entries) if metric.implausible is not None else ""
        if what:
            raise Refused(REASON, key=metric.key, detail=what)


def _entries(metrics: Metrics, sums: Tree, rows: int) -> int:
    """The number of entries in the rows: the count of the means, or the entries of an example row times the rows."""
    if metrics.entries is None:
        return rows * max(1, metrics.example()[1][:1].numel())
    means = (metrics.part_of[metric.key] for metric in metrics.metrics[1:] if isinstance(metric.sums, MeanOf))
    return next((int(sums[part]["count"]) for part in means if part in sums), rows)


def _refuse_mean(metric: Metric, total: Tensor, count: Tensor, rows: int | None) -> None:
    """`Refused` if a mean has another count of rows, or is outside the range of one row."""
    number, value = float(count), float(total)
    if number < 0 or (rows is not None and number != rows):
        raise Refused(REASON, key=metric.key, detail=f"a mean over {number:g} rows, where it has {rows}")
    least, most = metric.bounds or ((0.0, 1.0) if metric.unit == SHARE else (None, None))
    room = ROUNDING * max(1.0, number)
    if (least is not None and value < least * number - room) or (most is not None and value > most * number + room):
        detail = f"a sum of {value:g} over {number:g} rows, of which each has {least} to {most}"
        raise Refused(REASON, key=metric.key, detail=detail)
