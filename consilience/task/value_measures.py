"""The built-in metrics of tokens and of real values."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consilience.core.metrics import SHARE, MeanOf, Metric
from consilience.core.tree import Tree
from consilience.task.measures import ON_ALL_ROWS, View, expanded, per_entry


def in_top(view: View, k: int, output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Whether the true class is among the k with the largest logits; of equal logits the later class comes first."""
    logits = view(output)
    label = target.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
    own = logits.gather(-1, label)
    later = torch.arange(logits.shape[-1], device=logits.device) > label
    ahead = ((logits > own) | ((logits == own) & later)).sum(-1)
    return per_entry(((ahead < k) & ~own.squeeze(-1).isnan()).to(mask.dtype), mask)


def top(view: View, k: int) -> Metric:
    """The share of entries whose true class is among the k most likely."""
    each = functools.partial(in_top, view, k)
    return Metric.mean(each, key=f"top_{k}", title=f"top-{k} accuracy", unit=SHARE, caption=ON_ALL_ROWS, detail=True)


def surprisals(view: View, output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """-log p of the true class of every entry."""
    chances = view(output).to(torch.promote_types(mask.dtype, torch.float32)).log_softmax(-1)
    label = target.clamp(0, chances.shape[-1] - 1).unsqueeze(-1)
    surprise = -chances.gather(-1, label).squeeze(-1)
    return torch.where(mask > 0, surprise, 0) if surprise.shape == mask.shape else per_entry(surprise, mask)


def _perplexity(sums: Tree) -> Tensor:
    return (sums["total"] / sums["count"]).exp()


def _bits(sums: Tree) -> Tensor:
    return sums["total"] / sums["count"] / math.log(2)


def language(view: View) -> tuple[Metric, ...]:
    """Perplexity and bits per token, of all tokens that count."""
    sums = MeanOf(functools.partial(surprisals, view))
    perplexity = "exp of the mean of -log p over all test tokens; the number of tokens if nothing is known."
    return (
        Metric(key="perplexity", better="lower", sums=sums, bounds=(0.0, None), value=_perplexity, caption=perplexity),
        Metric(
            key="bits_per_token",
            title="bits per token",
            unit="bits",
            better="lower",
            sums=sums,
            value=_bits,
            caption="Mean of -log2 p over all test tokens.",
            detail=True,
        ),
    )


@dataclass(frozen=True)
class Residuals:
    """Sums [D] of squared errors, targets, and squared targets of every output, and the rows; None: all as one."""

    outputs: int | None

    def __call__(self, output: Tensor, target: Tensor, mask: Tensor) -> Tree:
        shape = (-1, self.outputs or 1)
        weight, wanted = expanded(mask, target.shape).reshape(shape), target.double().reshape(shape)
        off = output.double().reshape(shape) - wanted
        parts = {"residual": off.square(), "sum": wanted, "squares": wanted.square(), "count": torch.ones_like(wanted)}
        return {name: (value * weight).sum(0) for name, value in parts.items()}


def _rmse(sums: Tree) -> Tensor:
    return (sums["residual"] / sums["count"]).sqrt().mean()


def _r2(sums: Tree) -> Tensor:
    varied = sums["squares"] - sums["sum"].square() / sums["count"]
    known = varied > 1e-12 * sums["squares"]  # less is rounding: the targets are constant
    return (1 - sums["residual"][known] / varied[known]).mean() if bool(known.any()) else torch.tensor(torch.nan)


def impossible_residuals(sums: Tree, entries: int) -> str:
    """What is impossible about `Residuals`: negative squares, or outputs with different row counts."""
    if bool((sums["residual"] < 0).any()) or bool((sums["squares"] < 0).any()):
        return "a negative sum of squares"
    if bool((sums["sum"].square() > sums["squares"] * sums["count"] * (1 + 1e-6)).any()):
        return "targets whose sum is larger than their squares allow"
    return "" if bool((sums["count"] <= sums["count"].new_tensor(entries)).all()) else "more rows than it has"


def residual_scores(outputs: int | None) -> tuple[Metric, ...]:
    """RMSE and R squared; with several outputs the mean over them."""
    row: dict[str, Any] = {"sums": Residuals(outputs), "implausible": impossible_residuals}
    mean = "; mean over outputs" if outputs is not None and outputs > 1 else ""
    rmse, r2 = f"Root of the mean squared error{mean}.", f"Share of the targets' variance that is explained{mean}."
    return (
        Metric(key="rmse", title="RMSE", better="lower", value=_rmse, caption=rmse, **row),
        Metric(key="r2", title="R squared", value=_r2, caption=r2, **row),
    )
