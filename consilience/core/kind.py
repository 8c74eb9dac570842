"""A kind of task: the losses, decision and metrics that fit a model's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.metrics import Loss, Metric
from consilience.core.settings import Invalid, nearest

Pair = tuple[Tensor, Tensor]

IGNORED = -100
"""The target value that is ignored, as in PyTorch and Hugging Face."""


def _one_number() -> Pair:
    return torch.zeros(1, 1), torch.zeros(1)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of task: losses, decision and metrics in one object.

        count = Kind(name="count", losses=(poisson,), metrics=(deviance,), main="deviance")
        task = cs.Task(module, kind=count)

    losses: functions (output, target) -> [B] loss per example; the first is the default. metrics: besides
    the loss. main: the key of the metric that clients are compared by. decide: from the output to class numbers, None
    if the task has no decision. entries: (target) -> 1 where an entry of a target counts (tokens that are not padding,
    pixels with a label), 0 elsewhere; None: every row counts once. example: an (output, target) of one row,
    with the shapes that the metrics receive. multiclass: targets are class numbers, and outputs have a logit for
    each, along `class_axis`. axes: number of axes of a row's target (None: any). yes_no: targets are 0 or 1. ignored:
    the target value that is ignored. most_classes: the largest number of classes. for_width: makes the kind for a known
    number of classes, labels or outputs per row.
    """

    name: str
    losses: tuple[Loss, ...]
    metrics: tuple[Metric, ...] = ()
    main: str = "loss"
    decide: Callable[[Tensor], Tensor] | None = None
    entries: Callable[[Tensor], Tensor] | None = None
    example: Callable[[], Pair] = _one_number
    multiclass: bool = False
    class_axis: int = 1
    axes: int | None = None
    yes_no: bool = False
    ignored: int | None = None
    most_classes: int | None = None
    for_width: Callable[[int], Kind] | None = None

    def __post_init__(self) -> None:
        if not self.losses:
            raise Invalid(f"Kind {self.name!r} has no loss: give at least one function (output, target) -> [B]")

    @property
    def class_per_row(self) -> bool:
        """Whether every row has one class number, which some algorithms need."""
        return self.multiclass and self.entries is None

    def loss(self, name: str | None = None) -> Loss:
        """The loss of that name, or the default (the first)."""
        named = {loss_name(loss): loss for loss in self.losses}
        if name is None:
            return self.losses[0]
        if name not in named:
            known = ", ".join(named)
            raise Invalid(f"loss = {name!r} is not a loss of {self.name}: it has {known}{nearest(name, named)}")
        return named[name]

    def outputs(self, target: Tensor, classes: int | None) -> int:
        """Number of model outputs per row (or per entry of a row), for targets like `target[:1]`."""
        return classes if self.multiclass and classes is not None else max(1, target[:1].numel())

    def knowing(self, width: int | None) -> Kind:
        """The same kind for a known number of classes, labels or outputs."""
        return self if width is None or self.for_width is None else self.for_width(width)

    def refuse_targets(self, classes: int | None, setting: str, data: str) -> None:
        """Refuse targets that are not of this kind; `classes` is None where they are not class numbers."""
        if self.multiclass and classes is None:
            raise Invalid(f"{setting} needs class numbers, but the targets of {data} are real-valued (regression)")
        if self.most_classes is not None and (classes or 0) > self.most_classes:
            raise Invalid(f"{setting} is for {self.most_classes} classes, but {data} has {classes}")
        if classes is not None and self.decide is None:
            raise Invalid(f"{setting} does not fit {data}, which has {classes} classes: it needs real values")


def loss_name(loss: Loss) -> str:
    """The name of a loss."""
    return getattr(loss, "__name__", "custom")
