"""Evaluation: one pass over all test rows on the device, with scores overall and for every client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.metrics import MeanOf, host, ratio
from consilience.core.task import Task
from consilience.core.tree import Tree
from consilience.task.scores import ClientScores, Scores

_BYTES_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 27}  # of features: activations take several times that
_MOST_ROWS = 8192
_NUMBERS_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 22}  # of outputs that metrics are computed from


@torch.no_grad()
def evaluate(task: Task, model: Tree, test: Rows) -> Scores:
    """Test a model on all rows; gives scores overall and for each client's own rows."""
    found = _Totals(task, test)
    for x, y in batches(test):
        found.add(task.apply(model, x, train=False)[0], y)
    return found.scores()


@torch.no_grad()
def evaluate_each(task: Task, models: Tree, test: Rows) -> ClientScores:
    """The scores of stacked models [m, ...], each on all test rows."""
    count = len(next(iter(models["params"].values())))
    found = [evaluate(task, tree.rows(models, k), test) for k in range(count)]
    main = task.metrics.main_row
    loss, values = (np.array([_or_nan(scores[key]) for scores in found]) for key in ("loss", main.key))
    return ClientScores(main=main, loss=loss, values=values)


def batches(test: Rows) -> Iterator[tuple[Any, Tensor]]:
    """(x, y) batches of the rows that are small enough for one forward pass."""
    row_bytes = sum(leaf[:1].numel() * leaf.element_size() for leaf in tree.leaves(test.x))
    fitting = _BYTES_AT_ONCE.get(test.y.device.type, 1 << 20) // max(row_bytes, 1)
    size = int(np.clip(fitting, 16, _MOST_ROWS))
    for start in range(0, len(test.y), size):
        piece = slice(start, start + size)
        yield test.piece(piece)


class _Totals:
    """The sums of all metrics over batches of test rows, on their device until the end.

    Means are stored per row and added on the host, so that the last bits do not depend on the device or the batches;
    other metrics are summed over whole batches, and per client only if one of them is the main metric. Outputs of
    small batches are concatenated first, since metrics are many short operations.
    """

    def __init__(self, task: Task, test: Rows) -> None:
        metrics = task.metrics
        self._metrics, self._losses, self._rows = metrics, task.losses, test
        parts = {key: part for key, part in metrics.parts.items() if key != "loss"}
        self._means = {key: part for key, part in parts.items() if isinstance(part, MeanOf)}
        self._others = {key: part for key, part in parts.items() if key not in self._means}
        self._main = metrics.part_of[metrics.main]
        self._each: dict[str, list[Tensor]] = {key: [] for key in ("loss", *self._means)}  # of [B]
        self._counts: list[Tensor] = []  # of [B]: entries that count; none where rows do
        self._sums: Tree = {}
        self._of_clients: dict[int, Tree] = {}  # of the main metric, unless it is a mean
        self._waiting: list[tuple[Any, Tensor]] = []
        self._first = 0  # the number of the first buffered row

    def add(self, output: Any, target: Tensor) -> None:
        """One batch, after the one before."""
        self._each["loss"].append(self._losses(output, target).to(torch.float64))
        self._waiting.append((output, target))
        numbers = sum(leaf.numel() for piece, _ in self._waiting for leaf in tree.leaves(piece))
        if numbers >= _NUMBERS_AT_ONCE.get(target.device.type, 1 << 16):
            self._add_waiting()

    def _add_waiting(self) -> None:
        if not self._waiting:
            return
        output, target = self._waiting[0]
        if len(self._waiting) > 1:
            output, target = (tree.concatenate(parts) for parts in zip(*self._waiting))
        mask = torch.ones(len(target), dtype=torch.float64, device=target.device)
        plain = self._metrics.entries is None
        counted = mask if plain else self._metrics.counted(target, mask)
        if not plain:
            self._counts.append(counted.flatten(1).sum(1))
        for key, part in self._means.items():
            values = part.each(output, target, counted).to(torch.float64)
            self._each[key].append(values if plain else (values * counted).flatten(1).sum(1))
        sums = {key: tree.to(part(output, target, counted), torch.float64) for key, part in self._others.items()}
        self._sums = tree.map_leaves(torch.add, self._sums, sums) if self._sums else sums
        if self._main in self._others:
            self._add_clients(output, target, counted)
        self._waiting, self._first = [], self._first + len(target)

    def _add_clients(self, output: Any, target: Tensor, counted: Tensor) -> None:
        start = self._first
        first, last = self._rows.starts.numpy(), (self._rows.starts + self._rows.sizes).numpy()
        for k in np.flatnonzero((first < start + len(target)) & (last > start) & (last > first)).tolist():
            own = slice(max(0, int(first[k]) - start), int(last[k]) - start)
            sums = self._others[self._main](tree.rows(output, own), target[own], counted[own])
            sums = tree.to(sums, torch.float64)
            known = self._of_clients.get(k)
            self._of_clients[k] = sums if known is None else tree.map_leaves(torch.add, known, sums)

    def scores(self) -> Scores:
        """The values of all metrics, fetched from the device at once."""
        self._add_waiting()
        metrics, test = self._metrics, self._rows
        each = {key: torch.cat(parts) for key, parts in self._each.items()}
        counts = {"counts": torch.cat(self._counts)} if self._counts else {}
        owners = sorted(self._of_clients)
        own = tree.stack([self._of_clients[k] for k in owners]) if owners else {}
        each, counts, sums, own = host([each, counts, self._sums, own])
        entries = counts["counts"].numpy() if counts else None
        means = {key: (values.numpy(), None if key == "loss" else entries) for key, values in each.items()}
        for key, (values, over) in means.items():
            count = float(len(values) if over is None else over.sum())
            mean = {"total": torch.tensor(values.sum()), "count": torch.tensor(count, dtype=torch.float64)}
            sums = {**sums, key: mean}
        of_clients = np.full(len(test.sizes), np.nan)
        if self._main in means:
            of_clients = client_means(*means[self._main], test)
            value = metrics.main_metric.value
            if value is not ratio:  # such as exp of the mean
                one = torch.tensor(1.0, dtype=torch.float64)
                of_clients = np.array([float(value({"total": one * mean, "count": one})) for mean in of_clients])
        elif owners:
            of_clients[owners] = metrics.of_clients({self._main: own}, metrics.main)
        return Scores(
            rows=len(test.y),
            metrics=metrics.rows,
            values=metrics.values(sums),
            client_rows=test.sizes.numpy(),
            clients=ClientScores(main=metrics.main_row, loss=client_means(*means["loss"], test), values=of_clients),
        )


def client_means(values: np.ndarray, counts: np.ndarray | None, rows: Rows) -> np.ndarray:
    """[K] sum of values over each client's rows divided by the sum of counts (None: 1 per row); NaN without rows."""
    starts, sizes = rows.starts.numpy(), rows.sizes.numpy()
    columns = np.stack([values] if counts is None else [values, counts])  # [1 or 2, N]
    totals = np.concatenate([np.zeros((len(columns), 1)), np.cumsum(columns, 1)], 1)
    total, *counted = totals[:, starts + sizes] - totals[:, starts]
    count = counted[0] if counted else sizes
    return np.divide(total, count, out=np.full(len(sizes), np.nan), where=count > 0)


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value
