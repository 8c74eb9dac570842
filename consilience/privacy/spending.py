"""The privacy that rounds of sampled Gaussian mechanisms cost, by Google's `dp-accounting`.

Two federations are neighbours if one client has rows in one and none in the other. A round adds up clipped updates of
clients that take part with probability `rate`, independently, and adds Gaussian noise of `noise` times the clipping
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

MOST_ROUNDS = 100_000  # that are looked at when a budget is turned into rounds
FINEST = 1e-3  # relative, of a noise that is searched for
LEAST = 0.1  # noise in bounds that is counted: with less, a distribution has more values than memory holds
MISSING = "privacy is counted by dp-accounting: pip install 'consilience[dp]'"
EXACT_BITS = 8  # of a number of rounds: more of them are rounded up, to less than 1 % more rounds


class Spent(Invalid):
    """The next round would cost more than the budget holds; nothing of it was released."""


class Mechanism(NamedTuple):
    """What one round did: Gaussian noise in bounds, and the probability with which a client took part.

    discrete: the noise was the sum of whole numbers that clients drew.
    """

    noise: float
    rate: float
    discrete: bool = False


History = Mapping[Mechanism, int]
"""How many rounds were done with each mechanism: their order has no effect on what they cost together."""
NOTHING: History = {}


def history(done: Iterable[tuple[float, float]]) -> History:
    """The history of rounds given by their (noise, rate)."""
    return Counter(Mechanism(*one) for one in done)


def epsilon_of(past: History, delta: float) -> float:
    """What all these rounds cost together."""
    past = {mechanism: rounds for mechanism, rounds in past.items() if rounds}
    return _epsilon(tuple(sorted(past.items())), delta) if past else 0.0


def epsilon_so_far(past: History, delta: float) -> float:
    """What these rounds cost, or up to 0.8 % more rounds: so that not every round of a long run counts anew.

    Up to 256 rounds of a mechanism are counted exactly; of more, the number is rounded up to eight binary digits, so
    that there are 128 counts until it has doubled. The result is never below `epsilon_of`.
    """
    return epsilon_of({mechanism: _rounded_up(rounds) for mechanism, rounds in past.items()}, delta)


def _rounded_up(rounds: int) -> int:
    step = 1 << max(0, rounds.bit_length() - EXACT_BITS)
    return -(-rounds // step) * step


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What rounds of one mechanism cost in (epsilon, delta), together with those `after` which they are done."""

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
        """Of one round."""
        return Mechanism(self.noise, self.rate, self.discrete)

    def epsilon(self, rounds: int, after: History = NOTHING) -> float:
        """After so many rounds."""
        return epsilon_of(Counter(after) + Counter({self.mechanism: rounds}), self.delta)

    def fits(self, rounds: int, budget: float, after: History = NOTHING) -> bool:
        """Whether so many rounds more cost at most the budget; counted exactly where the quick answer is no."""
        together = Counter(after) + Counter({self.mechanism: rounds})
        return epsilon_so_far(together, self.delta) <= budget or epsilon_of(together, self.delta) <= budget

    def rounds_within(self, budget: float, after: History = NOTHING) -> int:
        """How many rounds fit into a budget."""
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
        """The seed of noise that everyone can repeat, so that nothing is private; None: the noise is secret."""
        ...

    @property
    def charged_first(self) -> bool:
        """Whether a round is paid for before clients are asked, since the server sees their noisy sum at once."""
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
    """The least noise, to a thousandth, with which so many rounds cost at most `budget`."""
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
    """The PLD of so many rounds: that of all but the last 2^k of them, which an earlier round has asked for, and these.

    So one more round costs one convolution, and a result does not depend on what was asked for before.
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

    Rounds with a server's Gaussian noise among them count as if nobody had been sampled, which is never too little.
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
