"""The built-in metrics of decisions; others are in `probabilities` and, of tokens and numbers, `value_measures`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from consilience.core.metrics import SHARE, Metric, ratio
from consilience.core.tree import Tree

ON_ALL_ROWS = "Of the global model on all test rows."

Decide = Callable[[Tensor], Tensor]
"""From the output to class numbers, of the targets' shape."""
View = Callable[[Tensor], Tensor]
"""From the output to logits [..., C], entry by entry in the order of the targets; [...] for yes or no."""


# --- entries ----------------------------------------------------------------------------------------------------------


def per_entry(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over those axes that the mask does not have."""
    return values.reshape(mask.shape) if values.numel() == mask.numel() else values.flatten(mask.dim()).mean(-1)


def expanded(mask: Tensor, shape: torch.Size) -> Tensor:
    """The mask of rows or entries as one of all entries, in float64."""
    return mask.reshape(*mask.shape, *[1] * (len(shape) - mask.dim())).expand(shape).double()


def hits(decide: Decide, output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """The share of right decisions in every row, or whether each is right where the mask has an entry for it."""
    decided = decide(output)
    return per_entry((decided == target.reshape(decided.shape)).to(mask.dtype), mask)


def absolute_errors(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """The absolute error of every row, averaged over its outputs."""
    return per_entry((output.reshape(target.shape) - target).abs().to(mask.dtype), mask)


# --- from counts of every class ---------------------------------------------------------------------------------------


def class_counts(decide: Decide, classes: int, output: Tensor, target: Tensor, mask: Tensor) -> Tree:
    """{"counts": [3, C]}: correct decisions, decisions and occurrences of every class."""
    decided, actual = decide(output).reshape(-1), target.reshape(-1).to(torch.int64)
    weight = expanded(mask, target.shape).reshape(-1)
    numbers = torch.stack([decided, decided, actual])  # [3, N]
    weights = torch.stack([weight * (decided == actual), weight, weight])
    place = numbers.clamp(-1, classes) + 1  # values that are no class are counted at the ends, which are cut off
    return {"counts": weights.new_zeros(3, classes + 2).scatter_add(1, place, weights)[:, 1:-1]}


@dataclass(frozen=True)
class LabelCounts:
    """{"counts": [3, L]} of the labels that are 1: right decisions, decisions and occurrences of each."""

    labels: int

    def __call__(self, output: Tensor, target: Tensor, mask: Tensor) -> Tree:
        shape = (-1, self.labels)
        weight = expanded(mask, target.shape).reshape(shape)
        decided = weight * (output.reshape(shape) > 0)
        actual = weight * (target.reshape(shape) == 1)
        return {"counts": torch.stack([decided * (actual > 0), decided, actual]).sum(1)}


def impossible_counts(sums: Tree, entries: int) -> str:
    """What is impossible about counts by class: hits above decisions or occurrences, or those above the entries."""
    counts = sums["counts"].to(torch.float64)
    if bool((counts < 0).any()) or bool((counts != counts.floor()).any()):
        return "counts that are no whole numbers"
    hits, decided, occurring = counts
    if bool((hits > decided).any()) or bool((hits > occurring).any()):
        return "more right decisions in a class than decisions or occurrences"
    most = max(float(decided.sum()), float(occurring.sum()))
    return "" if most <= entries else f"{most:g} decisions or occurrences over {entries} entries"


PRECISION, RECALL, F1, IOU = range(4)


def class_scores(which: int, counts: np.ndarray) -> np.ndarray:
    """[C] precision (0), recall (1), F1 (2) or IoU (3) from [3, C] counts; 0/0 counts as 0, NaN where nothing was."""
    right, decided, occurring = counts.astype(np.float64)
    over = (decided, occurring, decided + occurring, decided + occurring - right)[which]
    found = (2 * right if which == F1 else right) / np.maximum(over, 1)
    return np.where(decided + occurring > 0, found, np.nan)


def macro(which: int, sums: Tree) -> float:
    """The mean over the classes that occur or were predicted."""
    scores = class_scores(which, sums["counts"].numpy())
    known = scores[~np.isnan(scores)]
    return float(known.mean()) if len(known) else np.nan


def _of_class(which: int, number: int, sums: Tree) -> float:
    return float(class_scores(which, sums["counts"].numpy())[number])


def _micro_f1(sums: Tree) -> Tensor:
    right, decided, occurring = sums["counts"].sum(1)
    return 2 * right / (decided + occurring)


def accuracy(decide: Decide) -> Metric:
    """The share of correct decisions."""
    each = functools.partial(hits, decide)
    return Metric.mean(each, key="accuracy", unit=SHARE, caption=ON_ALL_ROWS)


Counts = Callable[[Tensor, Tensor, Tensor], Tree]


def macro_scores(counts: Counts, of: str = "classes") -> tuple[Metric, ...]:
    """Precision, recall and F1: means over the classes that occur or were predicted, each class counting once."""
    return tuple(
        Metric(
            key=key,
            title=f"macro {name}",
            unit=SHARE,
            sums=counts,
            implausible=impossible_counts,
            value=functools.partial(macro, which),
            caption=f"Mean over {of} of the {name} of the global model, on all test rows.",
            detail=key != "f1",
        )
        for which, (key, name) in enumerate((("precision", "precision"), ("recall", "recall"), ("f1", "F1")))
    )


def micro_f1(counts: Counts) -> Metric:
    """F1 of all labels together."""
    caption = "F1 of the decisions for all labels together, on all test rows."
    return Metric(
        key="micro_f1",
        title="micro F1",
        unit=SHARE,
        sums=counts,
        implausible=impossible_counts,
        value=_micro_f1,
        caption=caption,
        detail=True,
    )


def per_class(counts: Counts, classes: int, names: Sequence[str] = ()) -> tuple[Metric, ...]:
    """Precision, recall and F1 of every class: `recall_3` ..., with the class's name in the title."""
    called = [names[number] if number < len(names) else f"class {number}" for number in range(classes)]
    return tuple(
        Metric(
            key=f"{key}_{number}",
            title=f"{name} of {called[number]}",
            unit=SHARE,
            sums=counts,
            implausible=impossible_counts,
            value=functools.partial(_of_class, which, number),
            detail=True,
        )
        for number in range(classes)
        for which, (key, name) in enumerate((("precision", "precision"), ("recall", "recall"), ("f1", "F1")))
    )


def overlaps(counts: Counts) -> tuple[Metric, ...]:
    """Mean intersection over union and mean Dice coefficient."""
    iou = "Intersection of predicted and true area over their union; mean over classes."
    dice = "Twice the intersection of predicted and true area over the sum of both; mean over classes."
    return (
        Metric(
            key="iou",
            title="mean IoU",
            unit=SHARE,
            sums=counts,
            implausible=impossible_counts,
            value=functools.partial(macro, IOU),
            caption=iou,
        ),
        Metric(
            key="dice",
            title="mean Dice",
            unit=SHARE,
            sums=counts,
            implausible=impossible_counts,
            value=functools.partial(macro, F1),
            caption=dice,
        ),
    )


def all_hit(decide: Decide, output: Tensor, target: Tensor, mask: Tensor) -> Tree:
    """Rows [B] all of whose entries that count are right, and rows with any."""
    counts = mask.reshape(len(target), -1)
    right = (decide(output) == target.reshape(output.shape)).reshape(counts.shape)
    rows = counts.amax(1).double()
    return {"total": (rows * (right | (counts == 0)).all(1)).sum(), "count": rows.sum()}


def all_right(decide: Decide) -> Metric:
    """The share of rows with no wrong label."""
    caption = "Share of the test rows of which every label is right."
    sums = functools.partial(all_hit, decide)
    return Metric(
        key="exact_match", title="exact match", unit=SHARE, sums=sums, value=ratio, caption=caption, detail=True
    )
