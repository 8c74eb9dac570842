"""How much each client counted: client x round, and the weights that were learned."""

from __future__ import annotations

from typing import Any

import numpy as np

from consilience.reporting import style
from consilience.reporting.runs import RunData
from consilience.reporting.style import Figure

MOST_NAMED = 40
_MOST_LINES = 12


def table(run: RunData) -> np.ndarray:
    """[clients, rounds] aggregation weights; NaN for who took no part."""
    found = np.full((run.count, len(run.rows)), np.nan)
    for column, row in enumerate(run.rows):
        cohort, weights = row.get("cohort") or [], row.get("weights") or []
        if len(cohort) == len(weights):
            found[np.array(cohort, dtype=np.int64), column] = [np.nan if w is None else w for w in weights]
    return found


def over_rounds(run: RunData) -> list[Figure]:
    """The map of weights."""
    weights = table(run)
    if not np.isfinite(weights).any():
        return []
    figure = style.blank(height=height(run.count))
    axes = figure.subplots()
    image = axes.imshow(
        weights,
        aspect="auto",
        cmap=style.heat(),
        interpolation="none",
        extent=(0.5, weights.shape[1] + 0.5, *_ends(run)),
    )
    axes.grid(False)
    axes.set_facecolor(style.EMPTY)
    axes.set(xlabel="round", ylabel="client")
    style.whole_numbers(axes.xaxis)
    name_clients(axes.yaxis, run)
    figure.colorbar(image, ax=axes, label="aggregation weight", pad=0.02)
    caption = "Share of each client in the round's step; empty where it took no part."
    return [Figure(name="weights", title="Aggregation weights", caption=caption, figure=figure)]


def learned(run: RunData) -> list[Figure]:
    """The schedule of a run that follows one (deep unfolding), client by client."""
    options = run.config.get("algorithm", {})
    weighting = options.get("weighting", {}) if isinstance(options, dict) else {}
    name = weighting.get("name") if isinstance(weighting, dict) else weighting
    if not (run.algorithm.startswith("duw") or name == "schedule") or not run.rows:
        return []
    weights, names = table(run), run.client_names()
    if not np.isfinite(weights).any():
        return []
    figure = style.blank()
    axes = figure.subplots()
    rounds = np.arange(1, weights.shape[1] + 1)
    few = len(weights) <= _MOST_LINES
    for client, values in enumerate(weights):
        look = style.line(client) if few else {"color": style.LINES[0], "alpha": 0.35, "lw": 0.9}
        label = f"client {names[client]}" if few else None
        axes.plot(rounds, values, marker="o" if len(rounds) <= 12 else None, ms=3, label=label, **look)
    axes.axhline(1 / len(weights), color=style.SOFT, lw=0.9, ls=":", label="all alike")
    axes.set(xlabel="round", ylabel="aggregation weight")
    style.whole_numbers(axes.xaxis)
    style.legend(figure, axes)
    caption = "The learned schedule as it was applied: one curve per client."
    return [Figure(name="learned_weights", title="Learned weights (DUW)", caption=caption, figure=figure)]


def height(clients: int) -> float:
    """Tall enough for the clients to be told apart, never a tower."""
    return float(np.clip(1.2 + 0.085 * clients, 2.4, 4.6))


def name_clients(axis: Any, run: RunData) -> None:
    """Names where they are few and are no mere numbers; else ticks at whole numbers."""
    names = run.client_names()
    if len(names) <= MOST_NAMED // 2 and any(name != str(k) for k, name in enumerate(names)):
        axis.set_ticks(range(len(names)), [name if len(name) <= 12 else f"{name[:11]}…" for name in names], fontsize=8)
    else:
        style.whole_numbers(axis)


def _ends(run: RunData) -> tuple[float, float]:
    return run.count - 0.5, -0.5  # the first client on top
