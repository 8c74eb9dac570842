"""Who resembles whom, and who was given whose model: these say something of the clients' data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from consilience.reporting import style
from consilience.reporting.runs import RunData
from consilience.reporting.style import Figure

_MOST_MATRICES = 6
_MOST_NAMED = 40  # clients on the circle
_MOST_LABELLED = 10
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
    """The matrix at a few rounds, and how alike clients are on the whole."""
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
    figure = style.blank(height=4.3)
    axes = figure.subplots()
    angle = np.pi / 2 - 2 * np.pi * np.arange(run.count) / run.count
    x, y = np.cos(angle), np.sin(angle)
    most = max(pairs.values())
    for (a, b), times in sorted(pairs.items(), key=lambda item: item[1]):
        share = times / most
        axes.plot(x[[a, b]], y[[a, b]], color=style.LINES[0], lw=0.6 + 2.6 * share, alpha=0.25 + 0.55 * share)
    _places(axes, run, x, y)
    count, rounds = sum(pairs.values()), sum("model_of" in row for row in run.clients.values())
    caption = (
        f"Each dot is one client; a line joins two clients that exchanged models, thicker the more often (at most "
        f"{most} times; {count} swaps in {rounds} rounds). Lines between all clients mean that every model saw much of "
        f"the data. {_WARNING}"
    )
    return [Figure(name="swaps", title="Swaps", caption=caption, figure=figure)]


def swapped(run: RunData) -> Counter[tuple[int, int]]:
    """How often each pair of clients exchanged models."""
    pairs: Counter[tuple[int, int]] = Counter()
    cohorts = {row["round"]: row.get("cohort") or [] for row in run.rows}
    for number, row in run.clients.items():
        holders, sources = cohorts.get(number, []), row.get("model_of") or []
        if len(holders) == len(sources):
            pairs.update((a, b) for a, b in zip(holders, sources) if a < b)
    return pairs


def _places(axes: Any, run: RunData, x: np.ndarray, y: np.ndarray) -> None:
    axes.scatter(x, y, s=70 if run.count <= _MOST_NAMED else 14, color=style.LINES[1], zorder=3, lw=0)
    if run.count <= _MOST_NAMED:
        for name, left, up in zip(run.client_names(), x, y):
            side = "center" if abs(left) < 0.2 else "left" if left > 0 else "right"
            axes.text(1.1 * left, 1.1 * up, name[:14], ha=side, va="center", fontsize=8)
    axes.set(xlim=(-1.45, 1.45), ylim=(-1.25, 1.25), aspect="equal")
    axes.axis("off")


def _matrices(run: RunData, found: dict[int, tuple[np.ndarray, np.ndarray]]) -> Figure:
    numbers = sorted(found)
    chosen = [numbers[i] for i in np.unique(np.linspace(0, len(numbers) - 1, _MOST_MATRICES).round().astype(int))]
    columns = min(3, len(chosen))
    lines = -(-len(chosen) // columns)
    figure = style.blank(height=0.3 + 1.38 * lines, layout="compressed")
    grid = figure.subplots(lines, columns, squeeze=False)
    values = np.concatenate([found[number][1].ravel() for number in chosen])
    limits = {"vmin": float(np.nanmin(values)), "vmax": float(np.nanmax(values))}
    whole = run.count <= 2 * _MOST_NAMED and all(len(found[number][0]) > run.count / 2 for number in chosen)
    image: Any = None
    for place, axes in enumerate(grid.ravel()):
        if place >= len(chosen):
            axes.set_visible(False)
            continue
        ids, matrix = found[chosen[place]]
        shown = _spread(run, ids, matrix) if whole else matrix
        image = axes.imshow(shown, cmap=style.heat(), interpolation="none", **limits)
        axes.set_title(f"round {chosen[place]}", pad=3)
        _label(axes, None if whole else ids)
    figure.supxlabel("client", fontsize=9.2)
    figure.supylabel("client", fontsize=9.2)
    figure.colorbar(image, ax=grid.ravel().tolist(), label="similarity", pad=0.02)
    who = "among all clients" if whole else "among the clients of that round"
    caption = (
        f"Similarity of clients' models {who}, as the server measured it: rows and columns are clients, bright cells "
        "are similar pairs. Blocks of bright cells are groups of clients that learn alike; panels that brighten over "
        f"rounds show clients that converge. {_WARNING}"
    )
    return Figure(name="similarity", title="Similarity", caption=caption, figure=figure)


def _label(axes: Any, ids: np.ndarray | None) -> None:
    """Client numbers at the sides, where there is room for them."""
    axes.grid(False)
    axes.set_facecolor(style.EMPTY)
    axes.tick_params(labelsize=7, length=2)
    for axis in (axes.xaxis, axes.yaxis):
        if ids is None:
            style.whole_numbers(axis, most=4)
        elif len(ids) <= _MOST_LABELLED:
            turned = 90 if axis is axes.xaxis else 0
            axis.set_ticks(range(len(ids)), [str(client) for client in ids], rotation=turned)
        else:
            axis.set_ticks([])


def _spread(run: RunData, ids: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """[K, K] with the values of those compared."""
    whole = np.full((run.count, run.count), np.nan)
    whole[np.ix_(ids, ids)] = matrix
    return whole


def _trend(found: dict[int, tuple[np.ndarray, np.ndarray]]) -> Figure:
    rounds = np.array(sorted(found))
    pairs = [matrix[np.tril_indices(len(matrix), -1)] for matrix in (found[number][1] for number in rounds)]
    figure = style.blank()
    axes = figure.subplots()
    colour = style.LINES[2]
    low, high = [float(np.nanmin(values)) for values in pairs], [float(np.nanmax(values)) for values in pairs]
    axes.fill_between(rounds, low, high, color=colour, alpha=0.18, lw=0, label="least to most similar pair")
    axes.plot(rounds, [float(np.nanmean(values)) for values in pairs], color=colour, label="mean over pairs")
    axes.set(xlabel="round", ylabel="similarity")
    style.whole_numbers(axes.xaxis)
    style.legend(figure, axes)
    caption = (
        "Similarity between the clients of each round: mean over pairs, and the band from the least to the most "
        "similar pair. A rising line with a narrow band means that clients learn alike."
    )
    return Figure(name="similarity_trend", title="Similarity over rounds", caption=caption, figure=figure)
