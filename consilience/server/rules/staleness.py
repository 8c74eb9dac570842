"""How much less an update counts when the model it started from is old (Xie et al. 2019; Nguyen et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from consilience.core.settings import Checked, NonNegative, Positive


@runtime_checkable
class Staleness(Protocol):
    """A factor s(tau) with s(0) = 1."""

    def discount(self, staleness: Tensor) -> Tensor:
        """[m] factors in (0, 1] for [m] float64 numbers of rounds."""
        ...


@dataclass(frozen=True, kw_only=True)
class ConstantStaleness:
    """Old updates count in full: s = 1."""

    def discount(self, staleness: Tensor) -> Tensor:
        """Ones."""
        return torch.ones_like(staleness)


@dataclass(frozen=True, kw_only=True)
class PolynomialStaleness(Checked):
    """s = (1 + tau)^-power; 1/2 is FedBuff's 1/sqrt(1 + tau)."""

    power: NonNegative = 0.5

    def discount(self, staleness: Tensor) -> Tensor:
        """Polynomial decay."""
        return (1 + staleness).pow(-self.power)


@dataclass(frozen=True, kw_only=True)
class HingeStaleness(Checked):
    """s = 1 up to `tolerance` rounds, then 1 / (slope (tau - tolerance) + 1)."""

    slope: Positive = 10.0
    tolerance: NonNegative = 4.0

    def discount(self, staleness: Tensor) -> Tensor:
        """1 up to the tolerance, then hyperbolic decay."""
        return 1 / (self.slope * (staleness - self.tolerance).clamp(min=0) + 1)
