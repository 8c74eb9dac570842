"""The kinds whose targets are class numbers: of rows, of tokens, of pixels."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from consilience.core.kind import Kind
from consilience.core.metrics import Loss, Metric
from consilience.core.settings import Invalid, nearest
from consilience.task import measures, probabilities, value_measures
from consilience.task.layouts import DECISIONS, VIEWS, counted, counted_but_first, zeros
from consilience.task.losses import IGNORED, CrossEntropy, Layout, cross_entropy
from consilience.task.measures import Counts, accuracy, class_counts

Numbers = tuple[float, ...]
Names = tuple[str, ...]
FEW = 64  # classes of tokens whose macro scores mean something; more are a vocabulary


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
        """The kind for this number of classes; None: not known yet."""
        refuse_settings(self.class_weights, classes, self.label_smoothing, "classes")
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
        """The default metrics, and those requested by name."""
        decide, view, wanted = DECISIONS[self.layout], VIEWS[self.layout], self._wanted()
        count = 2 if classes is None else max(2, classes)
        counts: Counts = functools.partial(class_counts, decide, count)
        yield accuracy(decide)
        if self.axes == 2 or "iou" in wanted:
            yield from measures.overlaps(counts)
        if self.axes == 1:
            yield from value_measures.language(view)
        yield from (value_measures.top(view, k) for k in wanted.get("top_K", ()))
        if classes is None:
            return
        if self.axes is None or (self.layout == "last" and count <= FEW):
            yield from measures.macro_scores(counts)
        yield probabilities.calibration_error(view, multiclass=True)
        if "auroc" in wanted or (count == 2 and self.axes is None):
            yield from probabilities.ranking(view, 1 if count == 2 else count, multiclass=True)
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


def refuse_settings(weights: Numbers | None, count: int | None, smoothing: float, what: str) -> None:
    """Refuse weights and smoothing that no loss can have."""
    if not 0 <= smoothing < 1:
        raise Invalid(f"label_smoothing = {smoothing!r} must be at least 0 and below 1")
    if weights is None:
        return
    wrong = [w for w in weights if not (math.isfinite(w) and w >= 0)]
    if wrong or not any(weights):
        raise Invalid(f"class_weights holds {wrong[0] if wrong else 'only 0'}: weights are numbers >= 0, not all 0")
    if count is not None and len(weights) != count:
        raise Invalid(f"class_weights has {len(weights)} numbers for {count} {what}: give one for each")
