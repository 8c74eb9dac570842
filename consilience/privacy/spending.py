"""The privacy that rounds of a sampled Gaussian mechanism cost, by Google's `dp-accounting`.

Two federations are neighbours if one has a client more than the other. A round adds up clipped updates of clients that
take part with probability `rate`, independently, and adds Gaussian noise of `noise` times the clipping bound. Epsilon
is that of the privacy loss distribution (PLD): an upper bound, tight to its discretisation. (Accountants by central
limit theorems, "GDP", can fall below the truth and are not offered.)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from consilience.core.capabilities import ServerCapability
from consilience.core.settings import Fraction, Invalid, Positive, check

MOST_ROUNDS = 100_000  # that are looked at when a budget is turned into rounds
FINEST = 1e-3  # relative, of a noise that is searched for


class Spent(Invalid):
    """The next round would cost more than the budget holds; nothing of it was released."""


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What rounds cost in (epsilon, delta)."""

    noise: Positive
    rate: Fraction = 1.0
    delta: Positive = 1e-5

    def __post_init__(self) -> None:
        check(self)
        if self.delta >= 1:
            raise Invalid(f"Spending.delta = {self.delta!r} must be below 1: one over the number of clients, or less")

    def epsilon(self, rounds: int) -> float:
        """After so many rounds."""
        return _epsilon(self.noise, self.rate, self.delta, rounds) if rounds else 0.0

    def rounds_within(self, budget: float) -> int:
        """How many rounds cost at most so much."""
        if self.epsilon(1) > budget:
            return 0
        enough, tried = 1, 2  # epsilon grows with the rounds
        while tried < MOST_ROUNDS and self.epsilon(tried) <= budget:
            enough, tried = tried, 2 * tried
        while tried - enough > 1:
            middle = (enough + tried) // 2
            enough, tried = (middle, tried) if self.epsilon(middle) <= budget else (enough, middle)
        return enough


@runtime_checkable
class SpendsPrivacy(ServerCapability, Protocol):
    """A server rule whose every round costs privacy, which must be counted."""

    @property
    def spending(self) -> Spending:
        """What its rounds cost."""
        ...

    @property
    def epsilon(self) -> float | None:
        """The budget, if there is one."""
        ...

    def refuse_overspending(self, rounds: int) -> None:
        """Raise `Spent` if so many rounds cost more than the budget."""
        ...


def noise_for(budget: Positive, *, rounds: int, rate: Fraction = 1.0, delta: Positive = 1e-5) -> float:
    """The least noise, to a thousandth, with which so many rounds cost at most `budget`."""
    little, much = 0.0, 1.0
    while Spending(noise=much, rate=rate, delta=delta).epsilon(rounds) > budget:
        little, much = much, 2 * much
        if much > 1e6:
            raise Invalid(f"epsilon = {budget:g} is out of reach for {rounds} rounds at delta = {delta:g}")
    while much - little > FINEST * much:
        middle = (little + much) / 2
        within = Spending(noise=middle, rate=rate, delta=delta).epsilon(rounds) <= budget
        little, much = (little, middle) if within else (middle, much)
    return much


@functools.lru_cache(maxsize=4096)
def _epsilon(noise: float, rate: float, delta: float, rounds: int) -> float:
    return float(_one_round(noise, rate).self_compose(rounds).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=64)
def _one_round(noise: float, rate: float) -> Any:
    try:
        from dp_accounting.pld import privacy_loss_distribution  # takes seconds to import
    except ImportError as problem:
        raise Invalid("privacy is counted by dp-accounting: pip install 'consilience[dp]'") from problem
    return privacy_loss_distribution.from_gaussian_mechanism(standard_deviation=noise, sampling_prob=rate)
