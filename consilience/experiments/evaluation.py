"""How good a model is: one pass over all test rows on the device, for the federation and for every client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.task import Task
from consilience.core.tree import Tree

_BYTES_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 27}  # of features: activations take several times that
_MOST_ROWS = 8192


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """What a model does on test rows; values that make no sense for the task are None."""

    rows: int
    loss: float
    accuracy: float | None = None
    precision: float | None = None  # macro: the mean over classes that occur or were predicted
    recall: float | None = None
    f1: float | None = None
    absolute_error: float | None = None  # targets that are no class numbers
    client_rows: np.ndarray  # [K] test rows of each client
    client_loss: np.ndarray  # [K] NaN where a client has no test rows
    client_accuracy: np.ndarray  # [K]


@torch.no_grad()
def evaluate(task: Task, model: Tree, test: Rows, *, classes: int) -> Scores:
    """Test a model on all rows, each client's own among them; `classes` = 0 means targets are measurements."""
    losses, marks, counts = [], [], None
    for x, y in batches(test):
        output, _ = task.apply(model, x, train=False)
        losses.append(task.losses(output, y).to(torch.float64))
        if classes:
            decided = task.decide(output).reshape(y.shape)
            marks.append(_per_row((decided == y).to(torch.float64)))
            batch = _class_counts(decided, y, max(classes, 2, output.shape[1] if output.dim() > 1 else 0))
            counts = batch if counts is None else counts + batch
        else:
            marks.append(_per_row((output.reshape(y.shape) - y).abs().to(torch.float64)))
    loss, mark = (torch.cat(values).cpu().numpy() for values in (losses, marks))  # [N]; summed alike on every device
    precision, recall, f1 = macro(counts.cpu().numpy()) if counts is not None else (None, None, None)
    return Scores(
        rows=len(loss),
        loss=float(loss.mean()),
        accuracy=float(mark.mean()) if classes else None,
        precision=precision,
        recall=recall,
        f1=f1,
        absolute_error=None if classes else float(mark.mean()),
        client_rows=test.sizes.numpy(),
        client_loss=client_means(loss, test),
        client_accuracy=client_means(mark, test) if classes else np.full(len(test.sizes), np.nan),
    )


@torch.no_grad()
def evaluate_each(task: Task, models: Tree, test: Rows, *, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """([m] loss, [m] accuracy) of stacked models [m, ...], each on all test rows; accuracy is NaN without classes."""
    count = len(next(iter(models["params"].values())))
    found = [evaluate(task, tree.rows(models, k), test, classes=classes) for k in range(count)]
    accuracies = [np.nan if scores.accuracy is None else scores.accuracy for scores in found]
    return np.array([scores.loss for scores in found]), np.array(accuracies)


def batches(test: Rows) -> Iterator[tuple[Any, Tensor]]:
    """(x, y) pieces of the rows that are small enough to be passed through a model at once."""
    row_bytes = sum(leaf[:1].numel() * leaf.element_size() for leaf in tree.leaves(test.x))
    fitting = _BYTES_AT_ONCE.get(test.y.device.type, 1 << 20) // max(row_bytes, 1)
    size = int(np.clip(fitting, 16, _MOST_ROWS))
    for start in range(0, len(test.y), size):
        piece = slice(start, start + size)
        yield tree.rows(test.x, piece), test.y[piece]


def macro(counts: np.ndarray) -> tuple[float, float, float]:
    """Macro precision, recall and F1 from [3, C] hits, predictions and occurrences; 0/0 counts as 0."""
    seen = counts[1:].sum(0) > 0
    hits, predicted, occurring = counts[:, seen].astype(np.float64)
    precision = hits / np.maximum(predicted, 1)
    recall = hits / np.maximum(occurring, 1)
    f1 = 2 * hits / np.maximum(predicted + occurring, 1)
    return float(precision.mean()), float(recall.mean()), float(f1.mean())


def client_means(values: np.ndarray, rows: Rows) -> np.ndarray:
    """[K] mean of one value per row over each client's own rows; NaN for a client without any."""
    starts, sizes = rows.starts.numpy(), rows.sizes.numpy()
    totals = np.concatenate([[0.0], np.cumsum(values)])  # [N + 1]
    sums = totals[starts + sizes] - totals[starts]
    return np.divide(sums, sizes, out=np.full(len(sizes), np.nan), where=sizes > 0)


def fairness(accuracies: np.ndarray) -> dict[str, float | None]:
    """Mean, worst tenth (the mean of the worst 10 % of clients, at least one) and spread over clients with rows."""
    known = np.sort(accuracies[np.isfinite(accuracies)])
    if not len(known):
        return {"mean": None, "worst_tenth": None, "spread": None}
    worst = known[: max(1, len(known) // 10)]
    return {"mean": float(known.mean()), "worst_tenth": float(worst.mean()), "spread": float(known.std())}


def _per_row(values: Tensor) -> Tensor:
    return values if values.dim() == 1 else values.flatten(1).mean(1)


def _class_counts(decided: Tensor, target: Tensor, classes: int) -> Tensor:
    """[3, C]: hits, predictions and occurrences of every class."""
    decided, target = decided.flatten().to(torch.int64), target.flatten().to(torch.int64)
    hits = decided[decided == target]
    return torch.stack([torch.bincount(numbers, minlength=classes) for numbers in (hits, decided, target)])
