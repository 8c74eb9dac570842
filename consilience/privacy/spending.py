"""Privacy accounting for rounds of sampled Gaussian mechanisms, by Google's `dp-accounting`.

Two federations are neighbours if one client has rows in one and none in the other. A round adds up clipped updates of
clients that are sampled with probability `rate`, independently, and adds Gaussian noise of `noise` times the clipping
bound. Rounds may differ in both; epsilon is that of their composed privacy loss distribution (PLD): an upper bound,
tight to its discretisation. (Accountants by central limit theorems, "GDP", can fall below the truth: none is offered.)

Where clients add the noise, as whole numbers in a secure sum (`discrete`), a round is 1 / (2 noise^2) - concentrated
differentially private (`discrete_gaussian`), and so are rounds together, with the sum; epsilon follows by Renyi orders.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from consilience.core.capabilities import ServerCapability
from consilience.core.settings import Fraction, Invalid, Positive, check
from consilience.core.tree import Tree

MOST_ROUNDS = 100_000  # searched when a budget is converted to rounds
FINEST = 1e-3  # relative precision of a searched noise
LEAST = 0.1  # smallest noise, in units of the bound: with less, a distribution does not fit into memory
MISSING = "privacy is counted by dp-accounting: pip install 'consilience[dp]'"
EXACT_BITS = 8  # of a number of rounds: more of them are rounded up, to less than 1 % more rounds


class Spent(Invalid):
    """Raised if the next round would exceed the budget; nothing of it was released."""


class Mechanism(NamedTuple):
    """The mechanism of one round: Gaussian noise in units of the bound, and the sampling rate.

    discrete: the noise was the sum of whole numbers that clients drew.
    """

    noise: float
    rate: float
    discrete: bool = False


History = Mapping[Mechanism, int]
"""Number of rounds per mechanism; their order has no effect on the total cost."""
NOTHING: History = {}


def history(done: Iterable[tuple[float, float]]) -> History:
    """The history of rounds given by their (noise, rate)."""
    return Counter(Mechanism(*one) for one in done)


def epsilon_of(past: History, delta: float) -> float:
    """The epsilon of all these rounds together."""
    past = {mechanism: rounds for mechanism, rounds in past.items() if rounds}
    return _epsilon(tuple(sorted(past.items())), delta) if past else 0.0


def epsilon_so_far(past: History, delta: float) -> float:
    """An upper bound of `epsilon_of` with the number of rounds rounded up by at most 0.8 %, for caching in long runs.

    Up to 256 rounds of a mechanism are counted exactly; of more, the number is rounded up to eight binary digits, so
    that there are 128 counts until it has doubled. The result is never below `epsilon_of`.
    """
    return epsilon_of({mechanism: _rounded_up(rounds) for mechanism, rounds in past.items()}, delta)


def _rounded_up(rounds: int) -> int:
    step = 1 << max(0, rounds.bit_length() - EXACT_BITS)
    return -(-rounds // step) * step


@dataclass(frozen=True, kw_only=True)
class Spending:
    """The (epsilon, delta) cost of rounds of one mechanism, in addition to the earlier rounds `after`."""

    noise: Positive
    rate: Fraction = 1.0
    delta: Positive = 1e-5
    discrete: bool = False

    def __post_init__(self) -> None:
        check(self)
        if self.discrete and self.rate != 1:
            raise Invalid("noise that clients add is counted without sampling: leave Spending.rate at 1")
        if self.delta >= 1:
            raise Invalid(f"Spending.delta = {self.delta!r} must be below 1: one over the number of clients, or less")

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism of one round."""
        return Mechanism(self.noise, self.rate, self.discrete)

    def epsilon(self, rounds: int, after: History = NOTHING) -> float:
        """The epsilon after this many rounds."""
        return epsilon_of(Counter(after) + Counter({self.mechanism: rounds}), self.delta)

    def fits(self, rounds: int, budget: float, after: History = NOTHING) -> bool:
        """Whether this many more rounds cost at most the budget; computed exactly if the fast bound says no."""
        together = Counter(after) + Counter({self.mechanism: rounds})
        return epsilon_so_far(together, self.delta) <= budget or epsilon_of(together, self.delta) <= budget

    def rounds_within(self, budget: float, after: History = NOTHING) -> int:
        """The number of rounds that fit into a budget."""
        if self.epsilon(1, after) > budget:
            return 0
        enough, tried = 1, 2  # epsilon grows with the rounds
        while tried < MOST_ROUNDS and self.epsilon(tried, after) <= budget:
            enough, tried = tried, 2 * tried
        while tried - enough > 1:
            middle = (enough + tried) // 2
            enough, tried = (middle, tried) if self.epsilon(middle, after) <= budget else (enough, middle)
        return enough


@runtime_checkable
class SpendsPrivacy(ServerCapability, Protocol):
    """A server rule whose every round costs privacy, which must be counted."""

    @property
    def spending(self) -> Spending:
        """What one of its rounds costs."""
        ...

    @property
    def epsilon(self) -> float | None:
        """The budget, if there is one."""
        ...

    @property
    def noise_seed(self) -> int | None:
        """The seed of reproducible noise, which gives no privacy; None: the noise is secret."""
        ...

    @property
    def charged_first(self) -> bool:
        """Whether a round is charged before clients are contacted, since the server sees their noisy sum at once."""
        ...

    def spent_in(self, state: Tree) -> History:
        """The cost of the releases that led to a state of the server."""
        ...


def noise_for(
    budget: Positive,
    *,
    rounds: int,
    rate: Fraction = 1.0,
    delta: Positive = 1e-5,
    after: History = NOTHING,
    discrete: bool = False,
) -> float:
    """The least noise, to a thousandth, with which this many rounds cost at most `budget`."""
    little, much = 0.0, 1.0
    while Spending(noise=much, rate=rate, delta=delta, discrete=discrete).epsilon(rounds, after) > budget:
        little, much = much, 2 * much
        if much > 1e6:
            raise Invalid(f"epsilon = {budget:g} is out of reach for {rounds} rounds at delta = {delta:g}")
    while much - little > FINEST * much:
        middle = (little + much) / 2
        tried = Spending(noise=middle, rate=rate, delta=delta, discrete=discrete)
        within = tried.epsilon(rounds, after) <= budget
        little, much = (little, middle) if within else (middle, much)
    return much


@functools.lru_cache(maxsize=128)
def _epsilon(past: tuple[tuple[Mechanism, int], ...], delta: float) -> float:
    if any(mechanism.discrete for mechanism, _ in past):
        return _concentrated_epsilon(sum(rounds / (2 * mechanism.noise**2) for mechanism, rounds in past), delta)
    together = functools.reduce(lambda one, other: one.compose(other), (_composed(*item) for item in past))
    return float(together.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=16)  # each of some megabytes after thousands of rounds
def _composed(mechanism: Mechanism, rounds: int) -> Any:
    """The PLD of this many rounds, composed of all but the last 2^k (cached by an earlier round) and these.

    So one more round costs one convolution, and a result does not depend on earlier calls.
    """
    last = rounds & -rounds  # 1 0 1 1 0 0 -> 1 0 0
    if rounds == 1:
        return _one_round(mechanism)
    if last == rounds:
        half = _composed(mechanism, rounds // 2)
        return half.compose(half)
    return _composed(mechanism, rounds - last).compose(_composed(mechanism, last))


def _concentrated_epsilon(rho: float, delta: float) -> float:
    """Of rho-concentrated privacy: the least over Renyi orders a, each of which costs a rho.

    Rounds with server-side Gaussian noise are counted without amplification by sampling, an upper bound.
    """
    try:
        from dp_accounting.rdp import rdp_privacy_accountant
    except ImportError as problem:
        raise Invalid(MISSING) from problem
    best = 1 + math.sqrt(math.log(1 / delta) / rho)  # of the simplest conversion; the best one is near
    orders = np.unique(np.clip(1 + (best - 1) * np.geomspace(0.05, 20, 800), 1.011, None))
    return float(rdp_privacy_accountant.compute_epsilon(orders, orders * rho, delta)[0])


@functools.lru_cache(maxsize=64)
def _one_round(mechanism: Mechanism) -> Any:
    try:
        from dp_accounting.pld import privacy_loss_distribution  # takes seconds to import
    except ImportError as problem:
        raise Invalid(MISSING) from problem
    noise, rate, _ = mechanism
    if noise < LEAST:
        raise Invalid(
            f"noise = {noise:g} is too little to be counted: with less than {LEAST:g} bounds, one round alone costs "
            "more than epsilon = 80 without sampling, and protects nobody"
        )
    return privacy_loss_distribution.from_gaussian_mechanism(standard_deviation=noise, sampling_prob=rate)
