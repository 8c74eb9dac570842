"""How good a model is: one pass over all test rows on the device, for the federation and for every client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.metrics import ClientScores, MeanOf, Metrics, Scores, host
from consilience.core.task import Task
from consilience.core.tree import Tree

_BYTES_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 27}  # of features: activations take several times that
_MOST_ROWS = 8192


@torch.no_grad()
def evaluate(task: Task, model: Tree, test: Rows) -> Scores:
    """Test a model on all rows, each client's own among them."""
    found = _Totals(task.metrics, test)
    for start, x, y in batches(test):
        found.add(start, task.apply(model, x, train=False)[0], y)
    return found.scores()


@torch.no_grad()
def evaluate_each(task: Task, models: Tree, test: Rows) -> ClientScores:
    """The scores of stacked models [m, ...], each on all test rows."""
    count = len(next(iter(models["params"].values())))
    found = [evaluate(task, tree.rows(models, k), test) for k in range(count)]
    main = task.metrics.main_row
    loss, values = (np.array([_or_nan(scores[key]) for scores in found]) for key in ("loss", main.key))
    return ClientScores(main=main, loss=loss, values=values)


def batches(test: Rows) -> Iterator[tuple[int, Any, Tensor]]:
    """(first row, x, y) of pieces of the rows that are small enough to be passed through a model at once."""
    row_bytes = sum(leaf[:1].numel() * leaf.element_size() for leaf in tree.leaves(test.x))
    fitting = _BYTES_AT_ONCE.get(test.y.device.type, 1 << 20) // max(row_bytes, 1)
    size = int(np.clip(fitting, 16, _MOST_ROWS))
    for start in range(0, len(test.y), size):
        piece = slice(start, start + size)
        yield start, tree.rows(test.x, piece), test.y[piece]


class _Totals:
    """The sums of all metrics over batches of test rows, on their device until the end.

    Means are kept row by row and added on the host, so that the last bits are the same on every device and however rows
    were cut; other metrics are summed over whole batches, and client by client only where one of them is the main one.
    """

    def __init__(self, metrics: Metrics, test: Rows) -> None:
        self._metrics, self._rows = metrics, test
        parts = metrics.parts()
        self._means = {key: part for key, part in parts.items() if isinstance(part, MeanOf)}
        self._others = {key: part for key, part in parts.items() if key not in self._means}
        self._each: dict[str, list[Tensor]] = {key: [] for key in self._means}  # of [B]
        self._counts: list[Tensor] = []  # of [B]: entries that count; none where rows do
        self._sums: Tree = {}
        self._main = metrics.part(metrics.main)
        self._of_clients: dict[int, Tree] = {}  # of the main metric, unless it is a mean

    def add(self, start: int, output: Any, target: Tensor) -> None:
        """One batch, whose first row has this number."""
        mask = torch.ones(len(target), dtype=torch.float64, device=target.device)
        counted = self._metrics.counted(target, mask)
        if self._metrics.entries is not None:
            self._counts.append(counted.flatten(1).sum(1))
        for key, part in self._means.items():
            over = mask if key == "loss" else counted
            self._each[key].append(_row_by_row(part.each(output, target, over).to(torch.float64) * over))
        sums = {key: _double(part(output, target, counted)) for key, part in self._others.items()}
        self._sums = tree.map_leaves(torch.add, self._sums, sums) if self._sums else sums
        if self._main in self._others:
            self._add_clients(start, output, target, counted)

    def _add_clients(self, start: int, output: Any, target: Tensor, counted: Tensor) -> None:
        first, last = self._rows.starts.numpy(), (self._rows.starts + self._rows.sizes).numpy()
        for k in np.flatnonzero((first < start + len(target)) & (last > start) & (last > first)).tolist():
            own = slice(max(0, int(first[k]) - start), int(last[k]) - start)
            sums = _double(self._others[self._main](tree.rows(output, own), target[own], counted[own]))
            known = self._of_clients.get(k)
            self._of_clients[k] = sums if known is None else tree.map_leaves(torch.add, known, sums)

    def scores(self) -> Scores:
        """The values of all metrics, fetched from the device at once."""
        metrics, test = self._metrics, self._rows
        each = {key: torch.cat(parts) for key, parts in self._each.items()}
        counts = {"counts": torch.cat(self._counts)} if self._counts else {}
        owners = sorted(self._of_clients)
        own = tree.stack([self._of_clients[k] for k in owners]) if owners else {}
        each, counts, sums, own = host([each, counts, self._sums, own])
        ones = np.ones(len(test.y))
        entries = counts["counts"].numpy() if counts else ones
        means = {key: (values.numpy(), ones if key == "loss" else entries) for key, values in each.items()}
        for key, (values, over) in means.items():
            sums[key] = {"total": torch.tensor(values.sum()), "count": torch.tensor(over.sum())}
        of_clients = np.full(len(test.sizes), np.nan)
        if self._main in means:
            of_clients = client_means(*means[self._main], test)
        elif owners:
            of_clients[owners] = metrics.of_clients({self._main: own}, metrics.main)
        return Scores(
            rows=len(test.y),
            metrics=metrics.rows(),
            values=metrics.values(sums),
            client_rows=test.sizes.numpy(),
            clients=ClientScores(main=metrics.main_row, loss=client_means(*means["loss"], test), values=of_clients),
        )


def client_means(values: np.ndarray, counts: np.ndarray, rows: Rows) -> np.ndarray:
    """[K] sum of one value per row over each client's own rows, by that of the counts; NaN where nothing counts."""
    starts, sizes = rows.starts.numpy(), rows.sizes.numpy()
    sums, numbers = (np.concatenate([[0.0], np.cumsum(column)]) for column in (values, counts))  # [N + 1]
    total, count = (column[starts + sizes] - column[starts] for column in (sums, numbers))
    return np.divide(total, count, out=np.full(len(sizes), np.nan), where=count > 0)


def _row_by_row(values: Tensor) -> Tensor:
    return values if values.dim() == 1 else values.flatten(1).sum(1)


def _double(sums: Tree) -> Tree:
    return tree.map_leaves(lambda leaf: leaf.to(torch.float64), sums)


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value
