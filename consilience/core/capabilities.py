"""Optional behaviour of the four parts, and how it is found through the wrappers around the part that offers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
from torch import Tensor

from consilience.core.exchange import Broadcast, Cohort, Pool
from consilience.core.protocols import ClientRule
from consilience.core.settings import Invalid
from consilience.core.task import Task
from consilience.core.tree import Tree

C = TypeVar("C")
Reasons = Mapping[type, str]
RoundKeys = Callable[[int], bytes]
"""Gives the key of a round, which counts from 1; a second call for the same round may give another."""


def capability(part: object, protocol: type[C]) -> C | None:
    """What offers the optional behaviour: the part itself, or the nearest part that it wraps; None if nothing does."""
    if isinstance(part, protocol):
        return part
    if isinstance(part, Wraps) and protocol not in part.replaces:
        offers = (capability(inner, protocol) for inner in part.wrapped)
        return next((found for found in offers if found is not None), None)
    return None


class Wraps:
    """A part that wraps another of its kind and passes on its capabilities unless it declares otherwise.

    holds: the field with the wrapped part, or with a tuple of them.
    replaces: capabilities of the wrapped part that this one implements itself, or drops, and why.
    refuses: capabilities that would be lost inside this part: one that offers them is refused. The reason continues the
    sentence "Wrapper.field = Part ...".
    """

    holds: ClassVar[str]
    replaces: ClassVar[Reasons] = MappingProxyType({})
    refuses: ClassVar[Reasons] = MappingProxyType({})

    @property
    def wrapped(self) -> tuple[object, ...]:
        """The parts inside."""
        held = getattr(self, self.holds)
        return held if isinstance(held, tuple) else (held,)

    def __post_init__(self) -> None:
        """Refuse a part whose behaviour would be lost."""
        for part in self.wrapped:
            for protocol, reason in self.refuses.items():
                if capability(part, protocol) is not None:
                    raise Invalid(f"{type(self).__name__}.{self.holds} = {type(part).__name__} {reason}")


# --- who takes part --------------------------------------------------------------------------------------------------


class SelectionCapability(Protocol):
    """Optional behaviour of a selection."""


@runtime_checkable
class QueriesBeforeSelection(SelectionCapability, Protocol):
    """A selection that needs losses at the current model before it chooses: they are in `pool.losses`."""

    def queries(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """Ascending ids of the clients to ask."""
        ...


@runtime_checkable
class ChoosesCount(SelectionCapability, Protocol):
    """A selection of a fixed number of clients."""

    @property
    def count(self) -> int | None:
        """How many; None if a share is given instead."""
        ...


@runtime_checkable
class PoolsData(SelectionCapability, Protocol):
    """A selection for one client that holds all the data."""

    @property
    def pools_data(self) -> bool:
        """Whether the federation is to be pooled for it."""
        ...


# --- what a client does ----------------------------------------------------------------------------------------------


class ClientCapability(Protocol):
    """Optional behaviour of a client rule."""


@runtime_checkable
class PreTrainingPass(ClientCapability, Protocol):
    """A client rule with a pass over its rows before training; the result is in `message["seen"]` and is never sent."""

    @property
    def pre_training(self) -> ClientRule:
        """A rule whose work does not train, given the same message."""
        ...


@runtime_checkable
class PostTrainingPass(ClientCapability, Protocol):
    """A client rule with a pass over its rows after training, whose result is added to the reply."""

    @property
    def post_training(self) -> ClientRule:
        """A rule whose work does not train; the trained model is in `message["model"]`, what was sent to
        all in `message["received"]`."""
        ...


@runtime_checkable
class PersonalRule(ClientCapability, Protocol):
    """A client rule whose clients may have personal models, which federated evaluation tests as well."""

    @property
    def is_personal(self) -> bool:
        """Whether they have."""
        ...

    def personal(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """The model that this client would use."""
        ...


@runtime_checkable
class KeepsLayers(ClientCapability, Protocol):
    """A client rule that may keep some leaves of the model: they are remembered, and never sent."""

    @property
    def personal_layers(self) -> object | None:
        """Which, as the settings say it; None for none."""
        ...

    def kept_leaves(self, model: Tree) -> frozenset[str]:
        """Their names."""
        ...

    def completed(self, model: Tree, memory: Tree) -> Tree:
        """A model as it was received or sent, with this client's own leaves in place."""
        ...


@runtime_checkable
class ChecksTask(ClientCapability, Protocol):
    """A client rule, a term of its objective, or a server rule, that does not support every model and kind of task."""

    def check_against(self, task: Task) -> None:
        """Raise `Invalid`, with what is missing, before any training."""
        ...


@runtime_checkable
class PreparesTask(ClientCapability, Protocol):
    """A client rule that trains another form of the model: with more parts frozen, or with parts added."""

    def prepare(self, task: Task) -> Task:
        """The task in that form; a task that has it already stays as it is."""
        ...


@runtime_checkable
class ChecksRows(ClientCapability, Protocol):
    """A client rule that does not train on all features."""

    def check_rows(self, x: Any) -> None:
        """Raise `Invalid` for rows of shapes or types that it cannot work with, before any training."""
        ...


def own_model_of(client: ClientRule) -> PersonalRule | None:
    """The rule that gives the clients' personal models, if they have any."""
    found = capability(client, PersonalRule)
    return found if found is not None and found.is_personal else None


# --- what happens to a reply in transit ------------------------------------------------------------------------------


class ChannelCapability(Protocol):
    """Optional behaviour of a channel."""


@runtime_checkable
class SumsOnly(ChannelCapability, Protocol):
    """A channel that may deliver the sum of all replies alone."""

    @property
    def sums_only(self) -> bool:
        """Whether it does."""
        ...


@runtime_checkable
class HasForm(ChannelCapability, Protocol):
    """A channel that sends something other than a model."""

    @property
    def form(self) -> str:
        """ "dense" an update, "sparse" values and places, "codes" whole numbers, "" a model after all."""
        ...


@runtime_checkable
class HasFeedback(ChannelCapability, Protocol):
    """A channel that may send later what it holds back now."""

    @property
    def feedback(self) -> bool:
        """Whether it does."""
        ...


# --- what the server does --------------------------------------------------------------------------------------------


class ServerCapability(Protocol):
    """Optional behaviour of a server rule."""


@runtime_checkable
class Buffers(ServerCapability, Protocol):
    """A server rule that updates after `buffer` replies, while other clients keep working."""

    @property
    def buffer(self) -> int:
        """Replies to a round."""
        ...

    @property
    def concurrency(self) -> int | None:
        """Clients at work at any time; None: all that the selection names."""
        ...


@runtime_checkable
class MovesWithoutReplies(ServerCapability, Protocol):
    """A server rule that updates in every round; without replies `update` receives an empty cohort."""

    @property
    def moves_without_replies(self) -> bool:
        """Whether it does."""
        ...


@runtime_checkable
class DrawsSecretly(ServerCapability, Protocol):
    """A server rule whose draws must be secret: it and the selection receive a key of the round."""

    def round_key(self, round: int, keys: RoundKeys | None) -> bytes:
        """The key of a round, which counts from 1: from `keys`, or from where this rule has its own."""
        ...


@runtime_checkable
class ChecksSurroundings(ServerCapability, Protocol):
    """A server rule whose guarantee holds only in some surroundings, which it checks before a run starts."""

    def check_surroundings(self, algorithm: Any, engine: Any, limits: Any) -> None:
        """Refuse, by name and with the reason, what breaks the guarantee: parts, environment, limits."""
        ...


@runtime_checkable
class IndependentReplies(ServerCapability, Protocol):
    """A server rule whose proof needs each reply accepted or refused independently of the others (privacy)."""

    @property
    def independent_replies(self) -> bool:
        """Whether it does."""
        ...


@runtime_checkable
class TrainsModel(ServerCapability, Protocol):
    """A server rule that trains the model itself, on what the replies hold, after `update`."""

    def train(self, task: Task, state: Tree, cohort: Cohort) -> Tree:
        """The state with the trained model."""
        ...


@runtime_checkable
class ReceivesSizes(ServerCapability, Protocol):
    """A server rule that receives every client's number of rows before round 0."""

    @property
    def needs_sizes(self) -> bool:
        """False if it can do without."""
        ...

    def receive_sizes(self, state: Tree, sizes: np.ndarray) -> Tree:
        """The state, of the same structure, with [K] sizes known."""
        ...


@runtime_checkable
class ReceivesSchedule(ServerCapability, Protocol):
    """A server rule that must know, when it sends the model, how many steps each chosen client will do."""

    def broadcast_for(self, state: Tree, ids: np.ndarray, examples: Tensor, steps: np.ndarray) -> Broadcast:
        """What the chosen clients, with [m] rows and [m] steps ahead (0: no reply), are sent."""
        ...
