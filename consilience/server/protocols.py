"""Interfaces of the parts of an averaging server, and their optional capabilities."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from consilience.core.capabilities import ServerCapability, capability
from consilience.core.exchange import Cohort, Notes
from consilience.core.tree import Tree


@runtime_checkable
class Weighting(Protocol):
    """Computes the aggregation weights of the replies."""

    @property
    def needs_each_reply(self) -> bool:
        """False if the weights depend only on example counts."""
        ...

    def init(self, start: Tree, clients: int) -> Tree:
        """Its state before round 0 ({} if none)."""
        ...

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """([m] float64 weights that sum to one, state, what to report); `model` is the broadcast model."""
        ...


@runtime_checkable
class Combine(Protocol):
    """Merges weighted replies into one model."""

    @property
    def needs_each_reply(self) -> bool:
        """False for the weighted mean."""
        ...

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> one model."""
        ...


class CombineCapability(Protocol):
    """Optional behaviour of a `Combine`."""


@runtime_checkable
class CombineAround(CombineCapability, Protocol):
    """A `Combine` that also reads the broadcast model."""

    def merge_around(self, models: Tree, weights: Tensor, centre: Tree) -> Tree:
        """Stacked models [m, ...] that started from `centre` -> one model."""
        ...


@runtime_checkable
class Tolerant(CombineCapability, Protocol):
    """A `Combine` that needs a least number of replies."""

    def check_against(self, replies: int) -> None:
        """Refuse, with the inequality, settings that cannot work with this many replies."""
        ...


@runtime_checkable
class UsesWeights(CombineCapability, Protocol):
    """A `Combine` that may count every reply the same."""

    @property
    def uses_weights(self) -> bool:
        """False if it does."""
        ...


def uses_weights(combine: object) -> bool:
    """Whether weights have an effect: True unless a rule declares otherwise."""
    found = capability(combine, UsesWeights)
    return found is None or found.uses_weights


class RoundOutcome(NamedTuple):
    """The data of a round that a ledger reads."""

    cohort: Cohort
    weights: Tensor  # [m]
    before: Tree  # broadcast parameters
    after: Tree  # parameters after the server step
    clients: int  # in the whole federation


@runtime_checkable
class Ledger(Protocol):
    """Additional server state (SCAFFOLD's c, FedDyn's h)."""

    @property
    def name(self) -> str:
        """Its key in the server's state and, if it is sent, in the broadcast."""
        ...

    @property
    def needs_each_reply(self) -> bool:
        """False if it reads only sums of replies."""
        ...

    def initial(self, start: Tree, clients: int) -> Tree:
        """Its state before round 0."""
        ...

    def broadcast(self, ledger: Tree) -> Tree:
        """What is sent to clients ({} if nothing), as `message[name]`."""
        ...

    def update(self, ledger: Tree, round: RoundOutcome) -> tuple[Tree, Tree]:
        """(ledger, parameters) after a round; most do not change the parameters."""
        ...


@runtime_checkable
class Step(Protocol):
    """Moves the global model towards the merged model."""

    def init(self, params: Tree) -> Tree:
        """Its state before round 0 ({} if none)."""
        ...

    def move(self, params: Tree, merged: Tree, state: Tree) -> tuple[Tree, Tree]:
        """(new parameters, state)."""
        ...


@runtime_checkable
class MovesInRound(Protocol):
    """A `Step` that depends on the round."""

    def move_in(self, params: Tree, merged: Tree, state: Tree, round: int) -> tuple[Tree, Tree]:
        """(new parameters, state) after this round, which counts from 0."""
        ...


def take_step(step: Step, params: Tree, merged: Tree, state: Tree, round: int) -> tuple[Tree, Tree]:
    """(new parameters, state) after a step in this round."""
    if isinstance(step, MovesInRound):
        return step.move_in(params, merged, state, round)
    return step.move(params, merged, state)


class WeightingCapability(Protocol):
    """Optional behaviour of a `Weighting`."""


@runtime_checkable
class ReadsReplies(ServerCapability, WeightingCapability, Protocol):
    """A weighting, a ledger or a server rule that reads more of the replies than the model."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of entries that clients must add to their replies."""
        ...


@runtime_checkable
class Merges(ServerCapability, Protocol):
    """A server rule that merges replies by a `Combine`."""

    @property
    def combine(self) -> Combine:
        """The combining rule."""
        ...


def read_by(*parts: object) -> tuple[str, ...]:
    """Entries of the replies, besides the model, that some parts read."""
    readers = (capability(part, ReadsReplies) for part in parts)
    return tuple(dict.fromkeys(name for reader in readers if reader is not None for name in reader.reads))
