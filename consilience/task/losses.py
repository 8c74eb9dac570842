"""Losses, one value per example: batches may be padded, so nothing here averages over rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from consilience.core.kind import IGNORED as IGNORED

Layout = Literal["first", "last", "next"]
"""Where logits have their classes: [B, C, ...] or [B, ..., C]; "next": last, for the target one place further on."""


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits [B, C] against class numbers [B] (or [B, C, T] against [B, T], averaged over T)."""
    losses = F.cross_entropy(output, target, reduction="none")
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


def binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of one logit per example (or per label) against 0/1 targets."""
    logits = output.reshape(target.shape)
    losses = F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Squared error, averaged over each example's outputs."""
    losses = (output.reshape(target.shape) - target.to(output.dtype)).square()
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """Absolute error, averaged over each example's outputs."""
    losses = (output.reshape(target.shape) - target.to(output.dtype)).abs()
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


def huber(output: Tensor, target: Tensor) -> Tensor:
    """Half the squared error up to 1, linear beyond (PyTorch's HuberLoss), averaged over each example's outputs."""
    losses = F.huber_loss(output.reshape(target.shape), target.to(output.dtype), reduction="none")
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


@dataclass(frozen=True, kw_only=True)
class WeightedLoss:
    """A loss whose entries may have weights; `table` holds them as a tensor where it is computed."""

    weights: tuple[float, ...] | None = None
    smoothing: float = 0.0
    ignored: int | None = None
    table: Tensor | None = field(default=None, compare=False, repr=False)

    def placed(self, device: torch.device, dtype: torch.dtype | None) -> Self:
        """The same loss with its weights on a device: made there once, since a captured step cannot copy them."""
        if self.weights is None:
            return self
        return replace(self, table=torch.tensor(self.weights, dtype=dtype or torch.float32, device=device))

    def _weights(self, like: Tensor) -> Tensor | None:
        if self.weights is None:
            return None
        return self.placed(like.device, like.dtype).table if self.table is None else self.table.to(like.dtype)

    def _counts(self, target: Tensor) -> Tensor:
        return torch.ones_like(target, dtype=torch.bool) if self.ignored is None else target != self.ignored


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(WeightedLoss):
    """Cross-entropy with settings: the mean over the entries of a row that count; 0 for a row without any.

    weights: of the classes; an entry's loss is multiplied by that of its class, as PyTorch's with reduction="none".
    smoothing: this share of every target is spread evenly over all classes. ignored: the target that does not count.
    """

    layout: Layout = "first"
    __name__ = "cross_entropy"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if self.layout == "next":
            output, target = output[:, :-1], target[:, 1:]
        logits = output.movedim(1, -1) if self.layout == "first" else output
        if logits.shape[:-1] != target.shape:
            raise ValueError(
                f"outputs for {tuple(logits.shape[1:-1])} entries a row, targets {tuple(target.shape[1:])}"
            )
        counts = self._counts(target)
        losses = F.cross_entropy(  # flat, since only that is deterministic on CUDA
            logits.reshape(-1, logits.shape[-1]),
            torch.where(counts, target, 0).reshape(-1),
            weight=self._weights(logits),
            label_smoothing=self.smoothing,
            reduction="none",
        )
        return mean_of_entries(losses.reshape(target.shape), counts)


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy(WeightedLoss):
    """Binary cross-entropy with settings: the mean over the labels of a row that count; 0 for a row without any.

    weights: of a 0 and of a 1; or, with `per_label`, of every label. smoothing: this share of a target is 1/2.
    """

    per_label: bool = False
    __name__ = "binary_cross_entropy"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        logits, counts = output.reshape(target.shape), self._counts(target)
        wanted = torch.where(counts, target, 0).to(logits.dtype)
        smooth = wanted * (1 - self.smoothing) + self.smoothing / 2
        losses = F.binary_cross_entropy_with_logits(logits, smooth, reduction="none")
        weights = self._weights(logits)
        if weights is not None:
            losses = losses * (weights if self.per_label else torch.where(wanted > 0, weights[1], weights[0]))
        return mean_of_entries(losses, counts)


def mean_of_entries(losses: Tensor, counts: Tensor) -> Tensor:
    """[B] the mean over those entries of a row [B, ...] that count; 0 where none does."""
    if losses.dim() == 1:
        return torch.where(counts, losses, 0)
    counts = counts.flatten(1)
    return torch.where(counts, losses.flatten(1), 0).sum(1) / counts.sum(1).clamp(min=1).to(losses.dtype)


def average(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over live slots; 0 when none is live."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)
