"""Rounds real-valued shares to whole rows, and helper functions that partitions share."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from consilience.core.settings import Invalid

HALVINGS = 200  # of an interval of doubles: far more than 64 bits can resolve


def apportion(total: int, weights: Any, *, least: Any = 0, most: Any = None) -> np.ndarray:
    """`total` as whole numbers in proportion to `weights` (largest remainder), each within [least, most]."""
    weights = np.asarray(weights, dtype=np.float64)
    least = np.broadcast_to(np.asarray(least, dtype=np.int64), weights.shape)
    most = np.broadcast_to(np.asarray(total if most is None else most, dtype=np.int64), weights.shape)
    if not int(least.sum()) <= total <= int(most.sum()):
        raise Invalid(f"{total} rows cannot be shared out: between {least.sum()} and {most.sum()} are possible")
    exact = _within_limits(total, weights, least, most)
    whole = np.floor(exact + 1e-9).astype(np.int64)
    by_remainder = np.argsort(whole - exact, kind="stable")  # largest remainder first, ties by position
    while (missing := total - int(whole.sum())) > 0:  # the limits leave room, so every pass places at least one
        room = by_remainder[whole[by_remainder] < most[by_remainder]]
        whole[room[:missing]] += 1
    return whole


def _within_limits(total: int, weights: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Real shares `clip(level * weights, least, most)` at the level where they add up to `total`."""
    top = float(weights.max(initial=0.0))
    weights = np.maximum(weights / top, 1e-12) if top > 0 else np.ones_like(weights)
    plain = weights * (total / weights.sum())
    if ((plain >= least) & (plain <= most)).all():
        return plain
    low, high = 0.0, float(most.max()) / float(weights.min())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if np.clip(middle * weights, least, most).sum() > total:
            high = middle
        else:
            low = middle
    return np.clip(low * weights, least, most)


def row_count(labels: np.ndarray) -> int:
    """The number of rows to partition; zero is an error."""
    if len(labels) == 0:
        raise Invalid("labels is empty: a partition needs at least one row")
    return len(labels)


def refuse_too_few(key: str, min_size: int, clients: int, rows: int) -> None:
    """Refuse a minimum number of rows per client that there are not enough rows for."""
    if min_size * clients > rows:
        raise Invalid(
            f"{key} = {min_size} for {clients} clients needs {min_size * clients} rows, "
            f"but there are {rows}: at most {rows // clients}, or at most {rows // min_size} clients"
        )


def rows_by_class(labels: np.ndarray, partition: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """The classes that occur, ascending, and each one's rows."""
    row_count(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise Invalid(
            f"{partition} splits by class, but the targets are {labels.dtype} of shape "
            f"{labels.shape}, not one class number a row: use iid, quantity or natural"
        )
    classes, counts = np.unique(labels, return_counts=True)
    order = np.argsort(labels, kind="stable")
    return classes, np.split(order, np.cumsum(counts)[:-1])


def by_owner(owner: np.ndarray, rows: np.ndarray, clients: int) -> list[np.ndarray]:
    """Rows per client, ascending; `owner[i]` is the client of `rows[i]`, negative if no client has it."""
    order = np.lexsort((rows, owner))
    owner, rows = owner[order], rows[order].astype(np.int64)
    edges = np.searchsorted(owner, np.arange(clients + 1))
    return [rows[a:b] for a, b in pairwise(edges)]


def deal(rows: list[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows per client when client k gets `counts[c, k]` random rows of class c; the rest stay out."""
    clients = counts.shape[1]
    takers = np.tile(np.arange(clients), len(rows))
    owner = np.repeat(takers, counts.reshape(-1))
    taken = [rng.permutation(of_class)[: int(count.sum())] for of_class, count in zip(rows, counts)]
    return by_owner(owner, np.concatenate(taken), clients)
