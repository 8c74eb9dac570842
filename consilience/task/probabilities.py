"""The built-in metrics of probabilities: calibration error, AUROC and average precision."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core.metrics import SHARE, Metric
from consilience.core.tree import Tree
from consilience.task.measures import View, expanded

BINS = 1000
"""Bins of the scores, for AUROC and average precision."""
CONFIDENCES = 15
"""Bins of equal width of the confidence, for the calibration error."""


@dataclass(frozen=True)
class Calibration:
    """{"bins": [3, 15]}: confidence, right decisions and entries by the confidence of the decision."""

    view: View
    multiclass: bool

    def __call__(self, output: Tensor, target: Tensor, mask: Tensor) -> Tree:
        logits = self.view(output).double()
        if self.multiclass:
            confidence, decided = logits.softmax(-1).max(-1)
        else:
            logits = logits.reshape(target.shape)
            confidence, decided = logits.abs().sigmoid(), (logits > 0).to(torch.int64)
        weight = expanded(mask, target.shape).reshape(-1)
        right, confidence = (decided == target).double().reshape(-1), confidence.reshape(-1)
        place = (confidence.nan_to_num() * CONFIDENCES).ceil().long().clamp(1, CONFIDENCES) - 1  # (lower, upper]
        found = torch.where(weight > 0, torch.stack([confidence * weight, right * weight, weight]), 0)
        return {"bins": found.new_zeros(3, CONFIDENCES).scatter_add(1, place.expand(3, -1), found)}


def impossible_bins(sums: Tree, entries: int) -> str:
    """What is impossible about bins: every entry counts at most once."""
    bins = sums["bins"]
    if bool((bins < 0).any()):
        return "a bin with fewer than no entries"
    largest = float(bins.flatten(1).sum(1).max())
    return "" if largest <= entries + 1e-6 * max(1, entries) else f"{largest:g} in the bins of {entries} entries"


def _calibration_error(sums: Tree) -> Tensor:
    confidence, right, entries = sums["bins"]
    return (confidence - right).abs().sum() / entries.sum()


def calibration_error(view: View, *, multiclass: bool) -> Metric:
    """The expected calibration error: the mean distance of confidence and accuracy over 15 bins of confidence."""
    return Metric(
        key="calibration_error",
        title="calibration error",
        unit=SHARE,
        better="lower",
        sums=Calibration(view, multiclass),
        value=_calibration_error,
        implausible=impossible_bins,
        caption=f"Expected calibration error: |confidence - accuracy|, over {CONFIDENCES} bins of confidence.",
        detail=True,
    )


@dataclass(frozen=True)
class Thresholds:
    """{"bins": [L, 2, 1000]}: entries by score, of the negatives and of the positives of every class or label.

    A score z (a logit; with several classes the logarithm of p / (1 - p)) is in the bin of z / (1 + |z|): bins are fine
    where probabilities are near 1/2 and still tell apart those of 0.999 and 0.9999.
    """

    view: View
    labels: int  # 1: the score of class 1, of two
    multiclass: bool

    def __call__(self, output: Tensor, target: Tensor, mask: Tensor) -> Tree:
        weight = expanded(mask, target.shape).reshape(-1)
        logits = self.view(output).double()
        if not self.multiclass:
            scores, truth = logits.reshape(-1, self.labels), target.reshape(-1, self.labels) == 1
            weight = weight.reshape(-1, self.labels)
        elif self.labels == 1:
            flat = logits.reshape(-1, logits.shape[-1])
            scores, truth = (flat[:, 1] - flat[:, 0]).unsqueeze(1), target.reshape(-1, 1) == 1
            weight = weight.unsqueeze(1)
        else:
            logs = logits.reshape(-1, logits.shape[-1]).log_softmax(-1)[:, : self.labels]
            scores = logs - (-logs.expm1()).log()
            truth = target.reshape(-1, 1) == torch.arange(self.labels, device=target.device)
            weight = weight.unsqueeze(1).expand(truth.shape)
        weight = torch.where(scores.isnan() & (weight > 0), torch.nan, weight)  # then there is no value
        squashed = torch.where(scores.isinf(), scores.sign(), scores / (1 + scores.abs())).nan_to_num()
        place = ((squashed + 1) * (BINS / 2)).long().clamp(0, BINS - 1)
        place = place + BINS * truth.long() + 2 * BINS * torch.arange(self.labels, device=place.device)
        found = weight.new_zeros(self.labels * 2 * BINS).scatter_add(0, place.reshape(-1), weight.reshape(-1))
        return {"bins": found.reshape(self.labels, 2, BINS)}


def auroc_of(bins: np.ndarray) -> tuple[float, float]:
    """(AUROC, its largest error) from [L, 2, bins]; the mean over those with positives and negatives.

    Pairs within a bin count one half: whatever their order is, the error is at most half of their share.
    """
    negatives, positives = bins[:, 0], bins[:, 1]
    pairs = negatives.sum(1) * positives.sum(1)
    known = pairs > 0
    if np.isnan(bins).any() or not known.any():
        return math.nan, math.nan
    below = np.cumsum(negatives, 1) - negatives
    tied = (positives * negatives).sum(1)[known] / pairs[known] / 2
    found = (positives * below).sum(1)[known] / pairs[known] + tied
    return float(found.mean()), float(tied.mean())


def average_precision_of(bins: np.ndarray) -> tuple[float, float]:
    """(average precision, its largest error) from [L, 2, bins]; the mean over those with positives.

    The scores of a bin count as equal, as scikit-learn counts equal scores. Whatever their order is, the i-th of the p
    positives of a bin, with T positives and F negatives before it and n negatives in it, has a precision between
    (T + i) / (T + i + F + n) and (T + p) / (T + p + F).
    """
    found = [_average_precision(*pair[:, ::-1]) for pair in bins if pair[1].sum() > 0]  # the highest scores first
    if np.isnan(bins).any() or not found:
        return math.nan, math.nan
    value, error = np.mean(found, 0)
    return float(value), float(error)


def _average_precision(negatives: np.ndarray, positives: np.ndarray) -> tuple[float, float]:
    hit, missed = np.cumsum(positives), np.cumsum(negatives)  # including the bin's own
    used = positives > 0
    total, own = hit[-1], positives[used]
    hit, missed, before = hit[used], missed[used], (missed - negatives)[used]
    value = (own * hit / (hit + missed)).sum()
    most = (own * hit / (hit + before)).sum()
    digamma = torch.from_numpy(np.stack([hit + missed + 1, hit - own + missed + 1])).digamma().numpy()
    least = (own - missed * (digamma[0] - digamma[1])).sum()
    return value / total, max(most - value, value - least) / total


def _part_of(found: Callable[[np.ndarray], tuple[float, float]], which: int, sums: Tree) -> float:
    return found(sums["bins"].numpy())[which]


def ranking(view: View, labels: int, *, multiclass: bool) -> tuple[Metric, ...]:
    """AUROC and average precision, each with the largest error that the bins of its scores can make."""
    sums, found = Thresholds(view, labels, multiclass), []
    mean = f"; mean over {'classes, each against the others' if multiclass else 'labels'}" if labels > 1 else ""
    for key, title, of in (
        ("auroc", "AUROC", auroc_of),
        ("average_precision", "average precision", average_precision_of),
    ):
        caption = f"{title} from {BINS} bins of the score{mean}; {key}_error is the most that the bins can change it."
        value, error = (functools.partial(_part_of, of, which) for which in (0, 1))
        row: dict[str, Any] = {"unit": SHARE, "sums": sums, "implausible": impossible_bins}
        found += [
            Metric(key=key, title=title, value=value, caption=caption, detail=key != "auroc", **row),
            Metric(key=f"{key}_error", title=f"{title}: error", better="lower", value=error, detail=True, **row),
        ]
    return tuple(found)
