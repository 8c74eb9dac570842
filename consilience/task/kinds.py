"""The built-in kinds of task, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consilience.core.kind import Kind, loss_name
from consilience.core.metrics import Loss, Metric
from consilience.core.settings import Invalid, nearest
from consilience.task import measures, probabilities, value_measures
from consilience.task.class_kinds import Names, Numbers, classification, dense, next_token, refuse_settings, tokens
from consilience.task.layouts import (
    as_it_is,
    counted,
    sign,
    zeros,
)
from consilience.task.losses import (
    IGNORED,
    BinaryCrossEntropy,
    absolute_error,
    binary_cross_entropy,
    huber,
    squared_error,
)
from consilience.task.measures import (
    ON_ALL_ROWS,
    absolute_errors,
    accuracy,
    class_counts,
)


def _refuse_unknown(given: Names, known: Names, kind: str) -> None:
    for name in given:
        if name not in known:
            raise Invalid(f"metrics holds {name!r}: {kind} offers {', '.join(known)}{nearest(name, known)}")


# --- the kinds --------------------------------------------------------------------------------------------------------


def binary(*, class_weights: Numbers | None = None, label_smoothing: float = 0.0) -> Kind:
    """Yes or no by the sign of a logit: one for every row, or one for each of several labels."""
    return _binary(class_weights, label_smoothing, 1)


def _binary(class_weights: Numbers | None, label_smoothing: float, labels: int) -> Kind:
    refuse_settings(class_weights, 2, label_smoothing, "classes")
    plain = class_weights is None and not label_smoothing
    settings = BinaryCrossEntropy(weights=class_weights, smoothing=label_smoothing)
    return Kind(
        name="binary",
        losses=(binary_cross_entropy if plain else settings,),
        metrics=(
            accuracy(sign),
            *measures.macro_scores(functools.partial(class_counts, sign, 2)),
            probabilities.calibration_error(as_it_is, multiclass=False),
            *probabilities.ranking(as_it_is, 1, multiclass=False),
        ),
        main="accuracy",
        decide=sign,
        example=functools.partial(zeros, (1, labels), (1, labels) if labels > 1 else (1,)),
        yes_no=True,
        most_classes=2,
        for_width=functools.partial(_binary, class_weights, label_smoothing),
    )


@dataclass(frozen=True, kw_only=True)
class _Labels:
    """Several labels a row, each 0 or 1."""

    class_weights: Numbers | None = None
    label_smoothing: float = 0.0
    ignored: int = IGNORED
    metrics: Names = ()
    class_names: Names = ()

    def kind(self, labels: int | None = None) -> Kind:
        """The kind for this number of labels; None: not known yet."""
        refuse_settings(self.class_weights, labels, self.label_smoothing, "labels")
        _refuse_unknown(self.metrics, ("per_class",), "multi_label")
        count = labels or 1
        counts = measures.LabelCounts(count)
        loss = BinaryCrossEntropy(
            weights=self.class_weights, per_label=True, smoothing=self.label_smoothing, ignored=self.ignored
        )
        return Kind(
            name="multi_label",
            losses=(loss,),
            metrics=(
                accuracy(sign),
                *measures.macro_scores(counts, "labels"),
                measures.micro_f1(counts),
                measures.all_right(sign),
                probabilities.calibration_error(as_it_is, multiclass=False),
                *probabilities.ranking(as_it_is, count, multiclass=False),
                *(measures.per_class(counts, count, self.class_names) if "per_class" in self.metrics else ()),
            ),
            main="accuracy",
            decide=sign,
            entries=functools.partial(counted, self.ignored),
            example=functools.partial(zeros, (1, count), (1, count)),
            axes=1,
            yes_no=True,
            ignored=self.ignored,
            for_width=self.kind,
        )


def multi_label(*, labels: int | None = None, ignore_index: int = IGNORED, **settings: Any) -> Kind:
    """Several labels a row, each 0 or 1 (or `ignore_index`: unknown): outputs and targets [B, L]."""
    return _Labels(ignored=ignore_index, **settings).kind(labels)


def regression(outputs: int | None = None) -> Kind:
    """Real-valued targets, one or several for every row."""
    caption = ON_ALL_ROWS
    error = Metric.mean(
        absolute_errors,
        key="absolute_error",
        title="mean absolute error",
        better="lower",
        caption=caption,
        bounds=(0.0, None),
    )
    return Kind(
        name="regression",
        losses=(squared_error, absolute_error, huber),
        metrics=(error, *value_measures.residual_scores(outputs)),
        main="absolute_error",
        example=functools.partial(zeros, (1, outputs or 1), (1, outputs or 1), torch.float32),
        for_width=regression,
    )


BINARY, REGRESSION = binary(), regression()
FACTORIES: dict[str, Callable[..., Kind]] = {
    "classification": classification,
    "binary": binary,
    "multi_label": multi_label,
    "regression": regression,
    "tokens": tokens,
    "next_token": next_token,
    "dense": dense,
}
KINDS: dict[str, Kind] = {
    name: {"binary": BINARY, "regression": REGRESSION}.get(name) or make() for name, make in FACTORIES.items()
}
LOSSES: dict[str, Loss] = {loss_name(loss): loss for kind in reversed(KINDS.values()) for loss in kind.losses}
LOSS_SYNONYMS = {
    **dict.fromkeys(("mse", "mse_loss", "l2"), "squared_error"),
    **dict.fromkeys(("mae", "l1", "l1_loss"), "absolute_error"),
    **dict.fromkeys(("ce", "nll", "nll_loss", "crossentropyloss"), "cross_entropy"),
    **dict.fromkeys(("bce", "bce_with_logits", "bcewithlogitsloss"), "binary_cross_entropy"),
    "smooth_l1": "huber",
}
"""Names of our losses elsewhere, for error messages."""


def kind_named(name: str, **settings: Any) -> Kind:
    """A kind that is built in, with settings: class_weights, label_smoothing, ignore_index, metrics, class_names."""
    if name not in KINDS:
        hint = f": it is a loss, write loss={name!r}" if name in LOSSES else nearest(name, KINDS)
        raise Invalid(f"kind = {name!r} is not one of {', '.join(KINDS)}{hint}")
    if not settings:
        return KINDS[name]
    for key, value in settings.items():
        if key not in OFFERED[name]:
            fitting = ", ".join(other for other, keys in OFFERED.items() if key in keys)
            raise Invalid(f"{key} = {value!r} has no effect in {name}: it is a setting of {fitting or 'no kind'}")
    return FACTORIES[name](**settings)


_OF_CLASSES = ("class_weights", "label_smoothing", "metrics", "class_names")
_OF_ENTRIES = (*_OF_CLASSES, "ignore_index")
OFFERED: dict[str, tuple[str, ...]] = {
    "classification": _OF_CLASSES,
    "binary": ("class_weights", "label_smoothing"),
    "multi_label": _OF_ENTRIES,
    "regression": (),
    **dict.fromkeys(("tokens", "next_token", "dense"), _OF_ENTRIES),
}
"""The settings that each kind has."""


def kind_with_loss(name: str) -> Kind:
    """The built-in kind that a loss belongs to."""
    if name not in LOSSES:
        ours = LOSS_SYNONYMS.get(name.lower())
        hint = f": it is called {ours!r} here" if ours else nearest(name, LOSSES)
        raise Invalid(f"loss = {name!r} is not one of {', '.join(LOSSES)}{hint}")
    return next(kind for kind in KINDS.values() if LOSSES[name] in kind.losses)


def kind_of_targets(target: Tensor, classes: int | None) -> Kind:
    """The kind for these targets: class numbers: classification; several 0/1 a row: multi_label; else regression."""
    if classes is not None:
        return classification(classes=classes)
    several = target.dim() == 2 and not target.is_floating_point()
    yes_no = several and bool(((target == 0) | (target == 1)).all())
    return multi_label(labels=target.shape[1]) if yes_no else REGRESSION
