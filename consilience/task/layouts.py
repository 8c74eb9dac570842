"""Layouts of outputs and targets: decisions, logits per entry, and which entries count."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from consilience.core.kind import Pair
from consilience.task.losses import Layout
from consilience.task.measures import View


def largest(output: Tensor) -> Tensor:
    """The class with the largest logit: [B, C, ...] -> [B, ...]."""
    return output.argmax(1)


def largest_last(output: Tensor) -> Tensor:
    """The class with the largest logit: [B, ..., C] -> [B, ...]."""
    return output.argmax(-1)


def largest_before(output: Tensor) -> Tensor:
    """The token that each place of [B, T, C] predicts for the next: [B, T]; -1 at the first place."""
    return F.pad(output[:, :-1].argmax(-1), (1, 0), value=-1)


def sign(output: Tensor) -> Tensor:
    """Class 1 where the logit is positive, else 0."""
    return (output > 0).to(torch.int64)


def as_it_is(output: Tensor) -> Tensor:
    """Logits that have their classes last."""
    return output


def classes_last(output: Tensor) -> Tensor:
    """[B, C, ...] -> [B, ..., C]"""
    return output.movedim(1, -1)


def one_place_on(output: Tensor) -> Tensor:
    """[B, T, C] at the places that they predict; zeros at the first."""
    return F.pad(output[:, :-1], (0, 0, 1, 0))


DECISIONS: dict[Layout, Callable[[Tensor], Tensor]] = {
    "first": largest,
    "last": largest_last,
    "next": largest_before,
}
VIEWS: dict[Layout, View] = {"first": classes_last, "last": as_it_is, "next": one_place_on}


def counted(ignored: int, target: Tensor) -> Tensor:
    """Which entries count."""
    return target != ignored


def counted_but_first(ignored: int, target: Tensor) -> Tensor:
    """Which entries count, apart from the first, which nothing predicts."""
    places = torch.arange(target.shape[1], device=target.device)
    return (target != ignored) & (places > 0)


def zeros(output: tuple[int, ...], target: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Pair:
    """An example (output, target) of one row."""
    return torch.zeros(output), torch.zeros(target, dtype=dtype)
