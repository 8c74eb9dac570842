"""Similarity and model swaps between clients; these reveal something about their data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from consilience.reporting.charts import CLIENT, Axis, Band, Figure, Graph, Heat, Lines, Scale, Series
from consilience.reporting.figures.by_client import clients
from consilience.reporting.runs import RunData
from consilience.reporting.static import evenly

MOST_FRAMES = 40
"""The most rounds of a slider, evenly spaced."""

MEAN = "mean over rounds"
_MOST_WHOLE = 80  # up to this many clients, every client has a row in all frames
_WARNING = "The figure discloses which clients have similar data: think before you share it."


def similarities(run: RunData) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """By round: ([m] clients, [m, m] similarity, NaN on the diagonal)."""
    found = {}
    for number, row in run.clients.items():
        ids, below = row.get("compared"), row.get("similarity")
        if number > len(run.rows) or not isinstance(ids, list) or not isinstance(below, list):
            continue
        m = len(ids)
        values = np.array([np.nan if value is None else value for value in below], dtype=np.float64)
        if len(values) != m * (m - 1) // 2 or not np.isfinite(values).any():
            continue
        matrix = np.full((m, m), np.nan)
        matrix[np.tril_indices(m, -1)] = values
        found[number] = np.array(ids), np.where(np.isnan(matrix), matrix.T, matrix)
    return found


def over_rounds(run: RunData) -> list[Figure]:
    """The similarity matrix at a few rounds, and its mean over rounds."""
    found = similarities(run)
    if not found:
        return []
    pictures = [_matrices(run, found)]
    return [*pictures, _trend(found)] if len(found) > 1 else pictures


def swaps(run: RunData) -> list[Figure]:
    """Clients on a circle, a chord for every pair that exchanged models."""
    pairs = swapped(run)
    if not pairs:
        return []
    by_round = _swaps_by_round(run)
    frames = tuple((str(n), by_round[n]) for n in (sorted(by_round)[i] for i in evenly(len(by_round), MOST_FRAMES)))
    chart = Graph(names=run.client_names(), edges=[(a, b, n) for (a, b), n in sorted(pairs.items())], frames=frames)
    most = max(pairs.values())
    count, rounds = sum(pairs.values()), sum("model_of" in row for row in run.clients.values())
    caption = (
        f"Each dot is one client; a line joins two clients that exchanged models, thicker the more often (at most "
        f"{most} times; {count} swaps in {rounds} rounds; in the interactive figure a slider shows one "
        "round). Lines between all clients mean "
        f"that every model saw much of the data. {_WARNING}"
    )
    return [Figure(name="swaps", title="Swaps", caption=caption, chart=chart)]


def swapped(run: RunData) -> Counter[tuple[int, int]]:
    """How often each pair of clients exchanged models."""
    return Counter(pair for pairs in _swaps_by_round(run).values() for pair in pairs)


def _swaps_by_round(run: RunData) -> dict[int, list[tuple[int, int]]]:
    """Rounds in which models could be swapped, with the pairs that were."""
    cohorts, found = {row["round"]: row.get("cohort") or [] for row in run.rows}, {}
    for number, row in run.clients.items():
        holders, sources = cohorts.get(number, []), row.get("model_of") or []
        if sources and len(holders) == len(sources):
            found[number] = [(a, b) for a, b in zip(holders, sources) if a < b]
    return found


def _matrices(run: RunData, found: dict[int, tuple[np.ndarray, np.ndarray]]) -> Figure:
    numbers = sorted(found)
    chosen = [numbers[i] for i in evenly(len(numbers), MOST_FRAMES)]
    known = np.unique(np.concatenate([found[number][0] for number in chosen]))
    whole = run.count <= _MOST_WHOLE
    shown = np.arange(run.count) if whole else known  # every frame has the same rows, so that frames are comparable
    names = run.client_names()
    axis = clients(names) if whole else Axis("client", [names[k] for k in shown], of=CLIENT)
    frames = tuple((str(number), spread_out(shown, *found[number])) for number in chosen)
    if len(frames) > 1:
        frames = (*frames, (MEAN, mean_over([spread_out(shown, *found[number]) for number in chosen])))
    chart = Heat(values=frames[-1][1], down=axis, across=axis, scale=Scale("similarity"), frames=frames)
    caption = (
        "Similarity of clients' models, as the server measured it: rows and columns are clients, bright cells are "
        "similar pairs, empty cells are pairs that were not compared. In the interactive figure a slider "
        "shows single rounds. Blocks of bright "
        "cells are groups of clients that learn alike; matrices that brighten over rounds show clients that converge. "
        f"{_WARNING}"
    )
    return Figure(name="similarity", title="Similarity", caption=caption, chart=chart)


def mean_over(matrices: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of the known values in each cell; NaN without any."""
    total, times = np.zeros(matrices[0].shape), np.zeros(matrices[0].shape)
    for matrix in matrices:
        total += np.nan_to_num(matrix)
        times += np.isfinite(matrix)
    return np.divide(total, times, out=np.full(total.shape, np.nan), where=times > 0)


def spread_out(shown: np.ndarray, ids: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """The matrix among the clients `shown`, with the values of those compared."""
    whole = np.full((len(shown), len(shown)), np.nan)
    at = np.searchsorted(shown, ids)
    whole[np.ix_(at, at)] = matrix
    return whole


def _trend(found: dict[int, tuple[np.ndarray, np.ndarray]]) -> Figure:
    rounds = np.array(sorted(found))
    pairs = [matrix[np.tril_indices(len(matrix), -1)] for matrix in (found[number][1] for number in rounds)]
    low, high = [float(np.nanmin(values)) for values in pairs], [float(np.nanmax(values)) for values in pairs]
    band = Band(low, high, "least to most similar pair")
    mean = [float(np.nanmean(values)) for values in pairs]
    series = Series(name="mean over pairs", x=rounds, y=mean, look=2, bands=(band,))
    chart = Lines(series=[series], x=Axis("round", unit="whole"), y=Axis("similarity"))
    caption = (
        "Similarity between the clients of each round: mean over pairs, and the band from the least to the most "
        "similar pair. A rising line with a narrow band means that clients learn alike."
    )
    return Figure(name="similarity_trend", title="Similarity over rounds", caption=caption, chart=chart)
