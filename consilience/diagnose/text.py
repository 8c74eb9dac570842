"""The diagnosis in lines of text, for the terminal and the page."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from consilience.diagnose.diagnosis import Diagnosis


class Line(NamedTuple):
    """One thing that was measured."""

    what: str
    found: str
    chance: str  # the value for random clients; "" where it is not defined
    means: str


def lines(of: Diagnosis) -> list[Line]:
    """The measured values, each with its reference value and its meaning."""
    labels, quantity, effort = of.labels, of.quantity, of.effort
    found = [
        Line(
            "target skew" if labels.binned else "label skew",
            f"{labels.mean:.3f}",
            f"{labels.chance_mean:.3f}",
            "total variation between a client's labels and those of all"
            + (", targets cut at their deciles" if labels.binned else "")
            + "; 0: no skew",
        ),
        Line(
            "label entropy",
            f"{np.nanmean(labels.entropy):.2f}",
            "",
            "mean over clients; 1: balanced classes, 0: a single class",
        ),
        Line(
            "quantity skew",
            f"{quantity.gini:.2f}",
            "",
            f"Gini; {quantity.half} of {len(quantity.sizes)} clients hold half of the rows; the largest has "
            f"{quantity.ratio:.3g} x the rows of the smallest"
            + (f"; {quantity.empty} without rows" if quantity.empty else ""),
        ),
        *_shift(of),
        Line(
            "gradients at start",
            f"{of.start.b:.2f}",
            f"{of.start.chance:.2f}",
            "B = sqrt(E|g_k|^2 / |E g_k|^2); 1: all gradients are equal",
        ),
        Line(
            f"... round {of.later_round}",
            f"{of.later.b:.2f}",
            f"{of.later.chance:.2f}",
            f"B after {of.later_by}; {of.later.opposed:.0%} of pairs of clients have opposed gradients",
        ),
        Line(
            "model similarity",
            f"{of.similarity.mean:.3f}",
            f"{of.similarity.chance:.3f}",
            f"CKA of {of.similarity.of} after {of.local_epochs:g} local epochs from one model; 1: the same",
        ),
        Line(
            "work",
            f"{effort.epochs_ratio:.3g}",
            "",
            f"most : fewest local epochs; {effort.steps.min():.0f} to {effort.steps.max():.0f} steps a round",
        ),
        Line(
            "replies",
            f"{(effort.heard * effort.available).mean():.0%}",
            "",
            f"share that arrives; worst client {(effort.heard * effort.available).min():.0%}",
        ),
    ]
    if effort.seconds.max(initial=0) > 0:
        slow = effort.seconds
        found.append(
            Line(
                "reply time",
                f"{np.median(slow):.3g} s",
                "",
                f"simulated; slowest {slow.max():.3g} s; {effort.communication:.0%} is transfer; clients wait "
                f"{effort.waiting:.0%} of their time for the slowest",
            )
        )
    return found


def _shift(of: Diagnosis) -> list[Line]:
    shift = of.features
    if shift is None:
        return [Line("feature shift", "n/a", "", of.no_features)]
    rows = [
        Line(
            "feature shift",
            f"{shift.share:.3f}",
            f"{shift.chance:.3f}",
            f"share of variance between clients, p = {shift.p:.2f} ({shift.encoder} features)",
        )
    ]
    if shift.given_label is not None:
        rows.append(
            Line(
                "... within classes",
                f"{shift.given_label:.3f}",
                f"{shift.given_label_chance:.3f}",
                f"p = {shift.given_label_p:.2f}; not explained by unequal labels",
            )
        )
    return rows
