"""From free parameters to aggregation weights: theta [rounds, clients] -> Theta, row by row."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Constraint = Literal["square", "softmax", "raw"]


def free(table: Tensor, constraint: Constraint) -> Tensor:
    """The theta [rounds, clients] whose weights are this table, whose rows sum to one."""
    if constraint == "square":
        return table.sqrt()
    if constraint == "softmax":
        return table.clamp(min=torch.finfo(torch.float64).tiny).log()
    return table.clone()


def weights(theta: Tensor, constraint: Constraint) -> Tensor:
    """Theta: theta^2 / sum theta^2, softmax(theta), or theta itself, which need not sum to one."""
    # Paper: eq (19) and Algorithm 3 constrain nothing, eqs (2) and (6) want the simplex. Here: squares, normalised, as
    # the authors' code does; unconstrained weights scale the model up or down.
    if constraint == "square":
        return theta.square() / theta.square().sum(1, keepdim=True)
    return torch.softmax(theta, 1) if constraint == "softmax" else theta
