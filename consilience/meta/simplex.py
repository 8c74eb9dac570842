"""From free parameters to aggregation weights: theta [rounds, clients] -> Theta, row by row."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

Constraint = Literal["square", "softmax", "raw"]


def first(sizes: np.ndarray, rounds: int, constraint: Constraint) -> Tensor:
    """The theta [rounds, clients] whose weights are N_k / N in every round."""
    share = torch.from_numpy(np.asarray(sizes)).to(torch.float64) / float(np.sum(sizes))
    if constraint == "square":
        start = share.sqrt()
    elif constraint == "softmax":
        start = share.clamp(min=torch.finfo(torch.float64).tiny).log()
    else:
        start = share
    return start.repeat(rounds, 1)


def weights(theta: Tensor, constraint: Constraint) -> Tensor:
    """Theta: theta^2 / sum theta^2, softmax(theta), or theta itself, which need not sum to one."""
    # Paper: eq (19) and Algorithm 3 constrain nothing, eqs (2) and (6) want the simplex. Here: squares, normalised, as
    # the authors' code does; unconstrained weights scale the model up or down.
    if constraint == "square":
        return theta.square() / theta.square().sum(1, keepdim=True)
    return torch.softmax(theta, 1) if constraint == "softmax" else theta
