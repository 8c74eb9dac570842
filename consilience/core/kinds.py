"""The built-in kinds of task, by name."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consilience.core import chances, measures
from consilience.core.kind import Kind, loss_name
from consilience.core.layouts import (  # noqa: F401, so are largest and largest_last
    DECISIONS,
    VIEWS,
    as_it_is,
    counted,
    counted_but_first,
    largest,
    largest_last,
    sign,
    zeros,
)
from consilience.core.losses import (
    IGNORED,
    BinaryCrossEntropy,
    CrossEntropy,
    Layout,
    Loss,
    absolute_error,
    binary_cross_entropy,
    cross_entropy,
    huber,
    squared_error,
)
from consilience.core.measures import (  # noqa: F401, kinds of one's own are built with hits and macro
    ON_ALL_ROWS,
    Counts,
    View,
    absolute_errors,
    accuracy,
    class_counts,
    hits,
    macro,
)
from consilience.core.metrics import Metric
from consilience.core.settings import Invalid, nearest

Numbers = tuple[float, ...]
Names = tuple[str, ...]
FEW = 64  # classes of tokens whose macro scores mean something; more are a vocabulary


def _refuse_settings(weights: Numbers | None, count: int | None, smoothing: float, what: str) -> None:
    if not 0 <= smoothing < 1:
        raise Invalid(f"label_smoothing = {smoothing!r} must be at least 0 and below 1")
    if weights is None:
        return
    wrong = [w for w in weights if not (math.isfinite(w) and w >= 0)]
    if wrong or not any(weights):
        raise Invalid(f"class_weights holds {wrong[0] if wrong else 'only 0'}: weights are numbers >= 0, not all 0")
    if count is not None and len(weights) != count:
        raise Invalid(f"class_weights has {len(weights)} numbers for {count} {what}: give one for each")


def _refuse_unknown(given: Names, known: Names, kind: str) -> None:
    for name in given:
        if name not in known:
            raise Invalid(f"metrics holds {name!r}: {kind} offers {', '.join(known)}{nearest(name, known)}")


# --- the kinds --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Classes:
    """A kind whose targets are class numbers: one for a row, or one for each of its entries."""

    name: str
    layout: Layout = "first"
    axes: int | None = None
    main: str = "accuracy"
    class_weights: Numbers | None = None
    label_smoothing: float = 0.0
    ignored: int | None = None
    metrics: Names = ()
    class_names: Names = ()

    def kind(self, classes: int | None = None) -> Kind:
        """For so many classes; None: not known yet."""
        _refuse_settings(self.class_weights, classes, self.label_smoothing, "classes")
        inner = (2,) * (self.axes or 0)
        shape = (1, classes or 2, *inner) if self.layout == "first" else (1, *inner, classes or 2)
        plain = self.class_weights is None and not self.label_smoothing and self.ignored is None
        entries = counted_but_first if self.layout == "next" else counted
        return Kind(
            name=self.name,
            losses=(cross_entropy if plain else self._loss(),),
            metrics=tuple(self._metrics(classes)),
            main=self.main,
            decide=DECISIONS[self.layout],
            entries=None if self.ignored is None else functools.partial(entries, self.ignored),
            example=functools.partial(zeros, shape, (1, *inner)),
            multiclass=True,
            class_axis=1 if self.layout == "first" else -1,
            axes=self.axes,
            ignored=self.ignored,
            for_width=self.kind,
        )

    def _loss(self) -> Loss:
        return CrossEntropy(
            weights=self.class_weights, smoothing=self.label_smoothing, ignored=self.ignored, layout=self.layout
        )

    def _metrics(self, classes: int | None) -> Iterator[Metric]:
        """The usual ones, and those asked for by name."""
        decide, view, wanted = DECISIONS[self.layout], VIEWS[self.layout], self._wanted()
        count = 2 if classes is None else max(2, classes)
        counts: Counts = functools.partial(class_counts, decide, count)
        yield accuracy(decide)
        if self.axes == 2 or "iou" in wanted:
            yield from measures.overlaps(counts)
        if self.axes == 1:
            yield from measures.language(view)
        yield from (measures.top(view, k) for k in wanted.get("top_K", ()))
        if classes is None:
            return
        if self.axes is None or (self.layout == "last" and count <= FEW):
            yield from measures.macro_scores(counts)
        yield chances.calibration_error(view, multiclass=True)
        if "auroc" in wanted or (count == 2 and self.axes is None):
            yield from chances.ranking(view, 1 if count == 2 else count, multiclass=True)
        if "per_class" in wanted:
            yield from measures.per_class(counts, count, self.class_names)

    def _wanted(self) -> dict[str, list[int]]:
        known = ("auroc", "iou", "per_class", "top_K")
        found: dict[str, list[int]] = {}
        for name in self.metrics:
            top = _TOP.fullmatch(name)
            if name not in known[:-1] and top is None:
                offers = f"{self.name} offers {', '.join(known)} (such as top_5)"
                raise Invalid(f"metrics holds {name!r}: {offers}{nearest(name, known)}")
            found.setdefault("top_K" if top else name, []).extend([int(top[1])] if top else [])
        return found


_TOP = re.compile(r"top_([1-9][0-9]{0,3})")


def classification(*, classes: int | None = None, **settings: Any) -> Kind:
    """One class number per row (or per place of a row): accuracy, and the macro scores where `classes` is known."""
    return _Classes(name="classification", **settings).kind(classes)


def tokens(*, classes: int | None = None, ignore_index: int = IGNORED, **settings: Any) -> Kind:
    """A class number for every token: outputs [B, T, C], targets [B, T] (labels, or the words behind masks)."""
    return _Classes(name="tokens", layout="last", axes=1, ignored=ignore_index, **settings).kind(classes)


def next_token(*, classes: int | None = None, ignore_index: int = IGNORED, **settings: Any) -> Kind:
    """The next token: outputs [B, T, C]; targets [B, T] are the sequence itself, predicted from the place before."""
    made = _Classes(name="next_token", layout="next", axes=1, main="perplexity", ignored=ignore_index, **settings)
    return made.kind(classes)


def dense(*, classes: int | None = None, ignore_index: int = IGNORED, **settings: Any) -> Kind:
    """A class number for every pixel: outputs [B, C, H, W], targets [B, H, W]."""
    return _Classes(name="dense", axes=2, main="iou", ignored=ignore_index, **settings).kind(classes)


def binary(*, class_weights: Numbers | None = None, label_smoothing: float = 0.0) -> Kind:
    """Yes or no by the sign of a logit: one for every row, or one for each of several labels."""
    return _binary(class_weights, label_smoothing, 1)


def _binary(class_weights: Numbers | None, label_smoothing: float, labels: int) -> Kind:
    _refuse_settings(class_weights, 2, label_smoothing, "classes")
    plain = class_weights is None and not label_smoothing
    settings = BinaryCrossEntropy(weights=class_weights, smoothing=label_smoothing)
    return Kind(
        name="binary",
        losses=(binary_cross_entropy if plain else settings,),
        metrics=(
            accuracy(sign),
            *measures.macro_scores(functools.partial(class_counts, sign, 2)),
            chances.calibration_error(as_it_is, multiclass=False),
            *chances.ranking(as_it_is, 1, multiclass=False),
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
        """For so many labels; None: not known yet."""
        _refuse_settings(self.class_weights, labels, self.label_smoothing, "labels")
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
                chances.calibration_error(as_it_is, multiclass=False),
                *chances.ranking(as_it_is, count, multiclass=False),
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
        metrics=(error, *measures.residual_scores(outputs)),
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
        raise Invalid(f"loss = {name!r} is not one of {', '.join(LOSSES)}{nearest(name, LOSSES)}")
    return next(kind for kind in KINDS.values() if LOSSES[name] in kind.losses)


def kind_of_targets(target: Tensor, classes: int | None) -> Kind:
    """The kind for these targets: class numbers: classification; several 0/1 a row: multi_label; else regression."""
    if classes is not None:
        return classification(classes=classes)
    several = target.dim() == 2 and not target.is_floating_point()
    yes_no = several and bool(((target == 0) | (target == 1)).all())
    return multi_label(labels=target.shape[1]) if yes_no else REGRESSION
