"""Learning-rate schedules: a factor on the rate as a function of finished rounds (or steps within a round).

The factors equal those of `torch.optim.lr_scheduler` with `step()` called once per round (or step), except that a
schedule stays at its last value after its horizon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from consilience.core.settings import Checked, Count, Fraction, Invalid, Probability, check


@runtime_checkable
class RateSchedule(Protocol):
    """A factor for the learning rate."""

    def factor_at(self, position: Tensor) -> Tensor:
        """The float64 factor after `position` rounds or steps (0 at first); a pure function of a scalar, for vmap."""
        ...

    @property
    def zero_from(self) -> int | None:
        """The first position at which the factor stays 0; None: never."""
        ...


@dataclass(frozen=True, kw_only=True)
class Cosine(Checked):
    """floor + (1 - floor) (1 + cos(pi t / horizon)) / 2, then `floor`."""

    horizon: Count  # in a config: the run's rounds, unless given
    floor: Probability = 0.0

    def factor_at(self, position: Tensor) -> Tensor:
        """Half a cosine from 1 to the floor."""
        done = position.to(torch.float64).clamp(max=self.horizon) / self.horizon
        return self.floor + (1 - self.floor) * (1 + torch.cos(math.pi * done)) / 2

    @property
    def zero_from(self) -> int | None:
        """The horizon, if `floor` is 0."""
        return None if self.floor else self.horizon


@dataclass(frozen=True, kw_only=True)
class Linear(Checked):
    """1 - (1 - floor) t / horizon, then `floor`."""

    horizon: Count  # in a config: the run's rounds, unless given
    floor: Probability = 0.0

    def factor_at(self, position: Tensor) -> Tensor:
        """A straight line from 1 to the floor."""
        return 1 - (1 - self.floor) * position.to(torch.float64).clamp(max=self.horizon) / self.horizon

    @property
    def zero_from(self) -> int | None:
        """The horizon, if `floor` is 0."""
        return None if self.floor else self.horizon


@dataclass(frozen=True, kw_only=True)
class Exponential(Checked):
    """factor^t."""

    factor: Fraction = 0.99
    zero_from = None  # never

    def factor_at(self, position: Tensor) -> Tensor:
        """A geometric sequence."""
        return _power(self.factor, position)


@dataclass(frozen=True, kw_only=True)
class StepDecay(Checked):
    """factor^floor(t / every): the rate falls at regular intervals."""

    every: Count
    factor: Fraction = 0.1
    zero_from = None  # never

    def factor_at(self, position: Tensor) -> Tensor:
        """One power of `factor` per finished interval."""
        return _power(self.factor, torch.div(position, self.every, rounding_mode="floor"))


@dataclass(frozen=True, kw_only=True)
class Milestones:
    """factor^(how many of `at` are reached): the rate falls at these positions."""

    at: tuple[Count, ...]
    factor: Fraction = 0.1
    zero_from = None  # never

    def __post_init__(self) -> None:
        check(self)
        if not self.at or any(b <= a for a, b in zip(self.at, self.at[1:])):
            raise Invalid(f"Milestones.at = {list(self.at)} must be ascending whole numbers, at least one")

    def factor_at(self, position: Tensor) -> Tensor:
        """One power of `factor` per milestone reached."""
        return _power(
            self.factor, sum(((position >= at).to(torch.int64) for at in self.at), torch.zeros_like(position))
        )


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """start + (1 - start) t / length for t < length; from there `then`, which counts from 0 (None: 1)."""

    length: Count
    start: Fraction = 0.1
    then: RateSchedule | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.start == 1:
            raise Invalid("WarmUp.start = 1 is no warm-up: give a smaller one, or leave the warm-up out")

    def factor_at(self, position: Tensor) -> Tensor:
        """Linear warm-up, then the other schedule."""
        rising = self.start + (1 - self.start) * position.to(torch.float64) / self.length
        after = (position - self.length).clamp(min=0)
        later = torch.ones_like(rising) if self.then is None else self.then.factor_at(after)
        return torch.where(position < self.length, rising, later)

    @property
    def zero_from(self) -> int | None:
        """Where the other schedule is 0."""
        end = None if self.then is None else self.then.zero_from
        return None if end is None else self.length + end


def _power(base: float, exponent: Tensor) -> Tensor:
    return torch.pow(torch.full((), base, dtype=torch.float64, device=exponent.device), exponent)
