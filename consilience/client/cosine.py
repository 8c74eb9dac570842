"""Cosine similarity between representations."""

from __future__ import annotations

import torch
from torch import Tensor


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """[B] cosines of the rows of [B, d]; 0, with gradient 0, where a row is all zeros and so has no direction."""
    a, b = a.flatten(1), b.flatten(1)
    squares, others = a.square().sum(1), b.square().sum(1)
    both = (squares > 0) & (others > 0)
    one = torch.ones_like(squares)  # replaces zeros, since an infinite gradient times the zero of `where` is NaN
    lengths = torch.where(both, squares, one).sqrt() * torch.where(both, others, one).sqrt()
    return torch.where(both, (a * b).sum(1) / lengths, torch.zeros_like(lengths))
