"""Kinds of task: the meaning of a model's output, with its loss, decision and metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from consilience.core.losses import Loss, binary_cross_entropy, cross_entropy, squared_error
from consilience.core.metrics import SHARE, Metric
from consilience.core.settings import Invalid, nearest
from consilience.core.tree import Tree

ON_ALL_ROWS = "Of the global model on all test rows."
Pair = tuple[Tensor, Tensor]


def _one_number() -> Pair:
    return torch.zeros(1, 1), torch.zeros(1)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of task: losses, decision and metrics in one object.

        count = Kind(name="count", losses=(poisson,), metrics=(deviance,), main="deviance")
        task = cs.Task(module, kind=count)

    losses: functions (output, target) -> [B] loss per example; the first is the default. metrics: apart
    from the loss. main: the key of the metric that clients are compared by. decide: from the output to class numbers,
    None where nothing is decided. entries: (target) -> 1 where an entry of a target counts (tokens that are no
    padding, pixels with a label), 0 elsewhere; None: every row counts once. example: an (output, target) of one row,
    with the shapes that the metrics receive. multiclass: targets are class numbers, and outputs have a logit for
    each. most_classes: of the targets. for_classes: the same kind where the number of classes is known.
    """

    name: str
    losses: tuple[Loss, ...]
    metrics: tuple[Metric, ...] = ()
    main: str = "loss"
    decide: Callable[[Tensor], Tensor] | None = None
    entries: Callable[[Tensor], Tensor] | None = None
    example: Callable[[], Pair] = _one_number
    multiclass: bool = False
    most_classes: int | None = None
    for_classes: Callable[[int], Kind] | None = None

    def __post_init__(self) -> None:
        if not self.losses:
            raise Invalid(f"Kind {self.name!r} has no loss: give at least one function (output, target) -> [B]")

    def loss(self, name: str | None = None) -> Loss:
        """The loss of that name, or the first one."""
        named = {loss_name(loss): loss for loss in self.losses}
        if name is None:
            return self.losses[0]
        if name not in named:
            known = ", ".join(named)
            raise Invalid(f"loss = {name!r} is not a loss of {self.name}: it has {known}{nearest(name, named)}")
        return named[name]

    def outputs(self, target: Tensor, classes: int | None) -> int:
        """How many numbers a model gives for a row, whose target looks like `target[:1]`."""
        return classes if self.multiclass and classes is not None else max(1, target[:1].numel())

    def knowing(self, classes: int | None) -> Kind:
        """The same kind for a known number of classes."""
        return self if classes is None or self.for_classes is None else self.for_classes(classes)

    def refuse_targets(self, classes: int | None, loss: str, data: str) -> None:
        """Refuse targets that are not of this kind; `classes` is None where they are not class numbers."""
        if self.multiclass and classes is None:
            raise Invalid(
                f"loss = {loss!r} needs class numbers, but the targets of {data} are real-valued (regression)"
            )
        if self.most_classes is not None and (classes or 0) > self.most_classes:
            raise Invalid(f"loss = {loss!r} is for {self.most_classes} classes, but {data} has {classes}")
        if classes is not None and self.decide is None:
            raise Invalid(f"loss = {loss!r} does not fit {data}, which has {classes} classes: it needs real values")


def loss_name(loss: Loss) -> str:
    """What a loss is called."""
    return getattr(loss, "__name__", "custom")


# --- decisions --------------------------------------------------------------------------------------------------------


def largest(output: Tensor) -> Tensor:
    """The class with the largest logit: [B, C, ...] -> [B, ...]."""
    return output.argmax(1)


def sign(output: Tensor) -> Tensor:
    """Class 1 where the logit is positive, else 0."""
    return (output > 0).to(torch.int64)


Decide = Callable[[Tensor], Tensor]


def hits(decide: Decide, output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """The share of right decisions in every row, or whether each is right where the mask has an entry for it."""
    decided = decide(output)
    return per_entry((decided == target.reshape(decided.shape)).to(mask.dtype), mask)


def absolute_errors(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """The absolute error of every row, averaged over its outputs."""
    return per_entry((output.reshape(target.shape) - target).abs().to(mask.dtype), mask)


def per_entry(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over those axes that the mask does not have."""
    return values.reshape(mask.shape) if values.numel() == mask.numel() else values.flatten(mask.dim()).mean(-1)


def class_counts(decide: Decide, classes: int, output: Tensor, target: Tensor, mask: Tensor) -> Tree:
    """{"counts": [3, C]}: right decisions, decisions and occurrences of every class."""
    decided, actual = decide(output).reshape(-1), target.reshape(-1).to(torch.int64)
    weight = mask.reshape(*mask.shape, *[1] * (target.dim() - mask.dim())).expand(target.shape).reshape(-1).double()
    numbers = torch.stack([decided, decided, actual])  # [3, N]
    weights = torch.stack([weight * (decided == actual), weight, weight])
    place = numbers.clamp(-1, classes) + 1  # values that are no class are counted at the ends, which are cut off
    return {"counts": weights.new_zeros(3, classes + 2).scatter_add(1, place, weights)[:, 1:-1]}


def impossible_counts(sums: Tree, rows: int) -> str:
    """What cannot be true of `class_counts`: hits are decisions and occurrences, of which there are equally many."""
    counts = sums["counts"].to(torch.float64)
    if bool((counts < 0).any()) or bool((counts != counts.floor()).any()):
        return "counts that are no whole numbers"
    hits, decided, occurring = counts
    if bool((hits > decided).any()) or bool((hits > occurring).any()):
        return "more right decisions in a class than decisions or occurrences"
    return "" if bool(decided.sum() >= hits.sum()) else "fewer decisions than hits"


def macro(which: int, counts: np.ndarray) -> float:
    """Macro precision (0), recall (1) or F1 (2) from [3, C] hits, decisions and occurrences; 0/0 counts as 0."""
    seen = counts[1:].sum(0) > 0
    if not seen.any():
        return np.nan
    right, decided, occurring = counts[:, seen].astype(np.float64)
    over = (decided, occurring, decided + occurring)[which]
    return float(((2 * right if which == 2 else right) / np.maximum(over, 1)).mean())


def _macro(which: int, sums: Tree) -> float:
    return macro(which, sums["counts"].numpy())


def accuracy(decide: Decide) -> Metric:
    """The share of right decisions."""
    each = functools.partial(hits, decide)
    return Metric.mean(each, key="accuracy", unit=SHARE, caption=ON_ALL_ROWS)


def macro_scores(decide: Decide, classes: int) -> tuple[Metric, ...]:
    """Precision, recall and F1: means over the classes that occur or were predicted, each class counting once."""
    counts = functools.partial(class_counts, decide, classes)
    return tuple(
        Metric(
            key=key,
            title=f"macro {name}",
            unit=SHARE,
            sums=counts,
            value=functools.partial(_macro, which),
            implausible=impossible_counts,
            caption=f"Mean over classes of the {name} of the global model, on all test rows.",
            detail=key != "f1",
        )
        for which, (key, name) in enumerate((("precision", "precision"), ("recall", "recall"), ("f1", "F1")))
    )


# --- the kinds --------------------------------------------------------------------------------------------------------


def classification(*, classes: int | None = None) -> Kind:
    """One class number per row (or per place of a row): accuracy, and the macro scores where `classes` is known."""
    return Kind(
        name="classification",
        losses=(cross_entropy,),
        metrics=(accuracy(largest), *(macro_scores(largest, max(2, classes)) if classes else ())),
        main="accuracy",
        decide=largest,
        example=functools.partial(_one_row_of, classes or 2),
        multiclass=True,
        for_classes=_classification_of,
    )


def _classification_of(classes: int) -> Kind:
    return classification(classes=classes)


def _one_row_of(classes: int) -> Pair:
    return torch.zeros(1, classes), torch.zeros(1, dtype=torch.int64)


BINARY = Kind(
    name="binary",
    losses=(binary_cross_entropy,),
    metrics=(accuracy(sign), *macro_scores(sign, 2)),
    main="accuracy",
    decide=sign,
    most_classes=2,
)
"""Yes or no by the sign of a logit: one for every row, or one for each of several labels."""

REGRESSION = Kind(
    name="regression",
    losses=(squared_error,),
    metrics=(
        Metric.mean(
            absolute_errors,
            key="absolute_error",
            title="mean absolute error",
            better="lower",
            caption=ON_ALL_ROWS,
            bounds=(0.0, None),
        ),
    ),
    main="absolute_error",
)
"""Real-valued targets, one or several for every row."""

KINDS: dict[str, Kind] = {kind.name: kind for kind in (classification(), BINARY, REGRESSION)}
LOSSES: dict[str, Loss] = {loss_name(loss): loss for kind in KINDS.values() for loss in kind.losses}


def kind_named(name: str) -> Kind:
    """A kind that is built in."""
    if name not in KINDS:
        hint = f": it is a loss, write loss={name!r}" if name in LOSSES else nearest(name, KINDS)
        raise Invalid(f"kind = {name!r} is not one of {', '.join(KINDS)}{hint}")
    return KINDS[name]


def kind_with_loss(name: str) -> Kind:
    """The built-in kind that a loss belongs to."""
    if name not in LOSSES:
        raise Invalid(f"loss = {name!r} is not one of {', '.join(LOSSES)}{nearest(name, LOSSES)}")
    return next(kind for kind in KINDS.values() if LOSSES[name] in kind.losses)


def kind_of_targets(target: Tensor, classes: int | None) -> Kind:
    """The kind for these targets: class numbers: classification; several 0/1 a row: binary; else regression."""
    if classes is not None:
        return classification(classes=classes)
    several = target.dim() == 2 and not target.is_floating_point()
    return BINARY if several and bool(((target == 0) | (target == 1)).all()) else REGRESSION
