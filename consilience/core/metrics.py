"""Metrics: two pure functions (sums, value) and metadata; sums add over batches, clients and machines."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.settings import Invalid
from consilience.core.tree import Tree

Better = Literal["higher", "lower"]
Loss = Callable[[Tensor, Tensor], Tensor]
"""(output [B, ...], target [B, ...]) -> [B] loss of each example."""

Sums = Callable[[Tensor, Tensor, Tensor], Tree]
"""(output, target, mask) -> float sums; the mask is 1 where a row (or an entry of a row) counts, else 0."""

Each = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(output, target, mask) -> one value for every entry of the mask."""

SHARE = "share"  # the unit of values between 0 and 1
RESERVED = re.compile(
    "(round|loss|cohort|weights|drift|drift_relative|gamma|epsilon|staleness|rejected|refused|silent|empty_client"
    "|nonfinite|late|clipped_updates|capped_examples|memory_lost|worker_lost|simulated_seconds|compared|similarity|model_of"
    "|best_.*|client_.*|clients_.*|personal_.*|local_.*|train_.*|bytes_.*|target_.*|.*_percentiles)"
)
"""Names of other fields of a record, which metrics cannot use."""


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """Metadata of a metric for tables, figures and trackers; it is stored with every run.

    unit: "share" for values between 0 and 1. detail: recorded, but left out of overviews. main: the metric that clients
    are compared by.
    """

    key: str
    title: str
    unit: str = ""
    better: Better = "higher"
    caption: str = ""
    detail: bool = False
    main: bool = False


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A model quality metric: `value` of the `sums` over all test rows.

        def sums(output, target, mask):  # tensors whose sums over batches, clients and machines make sense
            return {"squares": ((output.squeeze(1) - target).square() * mask).sum(), "rows": mask.sum()}

        rmse = cs.Metric(key="rmse", better="lower", sums=sums, value=lambda s: (s["squares"] / s["rows"]).sqrt())

    key: its name in records. sums: (output, target, mask) -> a tree of tensors; only operations that `torch.vmap` can
    batch. value: from the tree, as float64 tensors on the CPU, to a number; NaN where there is none. Metrics with the
    same `sums` function share its work. A mean over rows is `Metric.mean`. bounds: the smallest and largest value of
    one row, for means (None: unbounded; a share lies between 0 and 1). implausible: for other sums, a function of a
    client's tree and its test rows that returns what is impossible about them ("" if nothing).
    """

    key: str
    sums: Sums
    value: Callable[[Tree], Any]
    title: str = ""
    unit: str = ""
    better: Better = "higher"
    caption: str = ""
    detail: bool = False
    bounds: tuple[float | None, float | None] | None = None
    implausible: Callable[[Tree, int], str] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", str(self.key)):
            raise Invalid(f"Metric.key = {self.key!r} must be a name of small letters, digits and _ (40 at most)")
        if self.better not in get_args(Better):
            raise Invalid(f"Metric {self.key}: better = {self.better!r} must be 'higher' or 'lower'")

    @staticmethod
    def mean(each: Each, *, key: str, **row: Any) -> Metric:
        """The mean of one value per row: `each(output, target, mask) -> [B]`, or like the mask if that is larger."""
        return Metric(key=key, sums=MeanOf(each), value=ratio, **row)

    def row(self, *, main: bool = False) -> MetricRow:
        """The metadata that is stored with a run."""
        return MetricRow(
            key=self.key,
            title=self.title or self.key.replace("_", " "),
            unit=self.unit,
            better=self.better,
            caption=self.caption,
            detail=self.detail,
            main=main,
        )


@dataclass(frozen=True)
class MeanOf:
    """The sums of a mean: the sum of the values that count, and their number."""

    each: Each

    def __call__(self, output: Tensor, target: Tensor, mask: Tensor) -> Tree:
        return {"total": (self.each(output, target, mask) * mask).sum(), "count": mask.sum()}


def ratio(sums: Tree) -> Tensor:
    """The value of a mean, NaN if nothing was counted; also works on stacked sums."""
    return sums["total"] / sums["count"]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """All metrics of a task, the loss first.

    main: the key of the metric that clients are compared by. entries: from targets to 1 where an entry counts, for
    targets of several entries a row; None: every row counts once. example: an (output, target) pair of one row, which
    gives the shapes of all sums.
    """

    metrics: tuple[Metric, ...]
    main: str
    entries: Callable[[Tensor], Tensor] | None
    example: Callable[[], tuple[Tensor, Tensor]]

    def __post_init__(self) -> None:
        keys = [metric.key for metric in self.metrics]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise Invalid(f"two metrics have the key {key!r}: rename one")
            if number and RESERVED.fullmatch(key):
                raise Invalid(f"Metric.key = {key!r} is the name of another field of the records: choose another")
        if self.main not in keys:
            raise Invalid(f"main = {self.main!r} is not one of the metrics {', '.join(keys)}")

    def __getitem__(self, key: str) -> Metric:
        return next(metric for metric in self.metrics if metric.key == key)

    @functools.cached_property
    def rows(self) -> tuple[MetricRow, ...]:
        """The metadata of all metrics, stored with a run."""
        return tuple(metric.row(main=metric.key == self.main) for metric in self.metrics)

    @functools.cached_property
    def main_metric(self) -> Metric:
        """The metric that clients are compared by."""
        return self[self.main]

    @functools.cached_property
    def main_row(self) -> MetricRow:
        """The row of the main metric."""
        return next(row for row in self.rows if row.main)

    @functools.cached_property
    def parts(self) -> dict[str, Sums]:
        """The distinct sums, by the key of the first metric that needs them."""
        return {self.part_of[metric.key]: metric.sums for metric in self.metrics}

    @functools.cached_property
    def main_parts(self) -> dict[str, Sums]:
        """The sums of the loss and of the main metric."""
        return {key: self.parts[key] for key in ("loss", self.part_of[self.main])}

    @functools.cached_property
    def part_of(self) -> dict[str, str]:
        """The key under which each metric's sums are stored."""
        return {m.key: next(other.key for other in self.metrics if other.sums == m.sums) for m in self.metrics}

    def sums(self, output: Tensor, target: Tensor, mask: Tensor, *, main_only: bool = False) -> Tree:
        """The sums of one batch, in float64; mask [B]."""
        counted = self.counted(target, mask)
        found = {
            key: part(output, target, mask if key == "loss" else counted)
            for key, part in (self.main_parts if main_only else self.parts).items()
        }
        return tree.map_leaves(lambda leaf: leaf.to(torch.float64), found)

    @functools.cached_property
    def shapes(self) -> dict[str, dict[str, torch.Size]]:
        """Shapes of the sums of every part, by path."""
        output, target = self.example()
        mask = torch.zeros(len(target))
        found = {}
        for key, part in self.parts.items():
            try:
                sums = part(output, target, mask if key == "loss" else self.counted(target, mask))
            except _WRONG as problem:
                raise Invalid(
                    f"metric {key!r} cannot be computed for the example of its kind ({_first_line(problem)}): "
                    f"{_listed(_shapes({'output': output, 'target': target}))}; give Kind.example a row like the data's"
                ) from problem
            found[key] = _shapes(sums)
        return found

    def zero(self, device: torch.device, *, main_only: bool = False) -> Tree:
        """All sums at zero."""
        return {
            key: tree.unflatten({p: torch.zeros(s, dtype=torch.float64, device=device) for p, s in shapes.items()})
            for key, shapes in self.shapes.items()
            if not main_only or key in self.main_parts
        }

    def counted(self, target: Tensor, mask: Tensor) -> Tensor:
        """The mask of all metrics except the loss: [B], or one value per entry of a target."""
        if self.entries is None:
            return mask
        entries = self.entries(target).to(mask.dtype)
        return entries * mask.reshape(-1, *[1] * (entries.dim() - 1))

    def values(self, sums: Tree) -> dict[str, float | None]:
        """The value of every metric whose sums are given; None for the others and for NaN."""
        found = {m.key: _number(m.value(sums[part])) for m in self.metrics if (part := self.part_of[m.key]) in sums}
        return {metric.key: found.get(metric.key) for metric in self.metrics}

    def of_clients(self, sums: Tree, key: str) -> np.ndarray:
        """[m] values of one metric from stacked sums [m, ...]; NaN where it is undefined."""
        metric = self[key]
        stacked = sums[self.part_of[key]]
        if metric.value is ratio:
            return ratio(stacked).numpy()
        count = len(next(tree.leaves(stacked)))
        found = [_number(metric.value(tree.rows(stacked, k))) for k in range(count)]
        return np.array([np.nan if value is None else value for value in found], dtype=np.float64)

    def try_on(self, output: Tensor, target: Tensor) -> None:
        """Refuse metrics that cannot be computed from these rows, or whose sums have unexpected shapes."""
        shown = _listed(_shapes({"output": output, "target": target}))
        mask = torch.ones(len(target), dtype=torch.float64)
        for metric in self.metrics[1:]:
            try:
                sums = metric.sums(output, target, self.counted(target, mask))
                float(metric.value(tree.to(sums, torch.float64)))
            except _WRONG as problem:
                reason = _first_line(problem)
                raise Invalid(f"metric {metric.key!r} cannot be computed from {shown}: {reason}") from problem
            here, expected = _shapes(sums), self.shapes[self.part_of[metric.key]]
            if here != expected:
                raise Invalid(
                    f"metric {metric.key!r} has sums of shapes {_listed(here)} for {shown}, and {_listed(expected)} "
                    "for the example of its kind: give Kind.example a row like the data's"
                )


def _shapes(sums: Tree) -> dict[str, torch.Size]:
    return {path: leaf.shape for path, leaf in tree.flatten(sums).items()}


def _listed(shapes: dict[str, torch.Size]) -> str:
    return ", ".join(f"{path} {tuple(shape)}" for path, shape in shapes.items())


def loss_metric(losses: Loss) -> Metric:
    """The mean loss per row."""
    each = functools.partial(_loss_of_each, losses)
    return Metric.mean(each, key="loss", better="lower", caption="Of the global model on all test rows.")


def _loss_of_each(losses: Loss, output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return losses(output, target)


_WRONG = (RuntimeError, IndexError, KeyError, TypeError, ValueError, AttributeError)
"""Errors that a metric's functions raise for unsuitable tensors."""


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".partition("\n")[0]


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def host(trees: Sequence[Tree]) -> Sequence[Tree]:
    """Trees of float64 tensors on the CPU, all fetched with one synchronisation."""
    leaves = [leaf for one in trees for leaf in tree.leaves(one)]
    if not leaves or leaves[0].device.type == "cpu":
        return trees
    packed = torch.cat([leaf.reshape(-1) for leaf in leaves]).cpu()
    pieces = iter(packed.split([leaf.numel() for leaf in leaves]))
    return [tree.map_leaves(lambda leaf: next(pieces).reshape(leaf.shape), one) for one in trees]
