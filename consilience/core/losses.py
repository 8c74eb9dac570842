"""Losses, one value per example: batches may be padded, so nothing here averages over rows."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]
"""(output [B, ...], target [B, ...]) -> [B] loss of each example."""


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


def average(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over live slots; 0 when none is live."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)
