"""Optional behaviour of the four parts of an algorithm, and its lookup through wrappers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
from torch import Tensor

from consilience.core.exchange import Broadcast, Cohort, Pool
from consilience.core.protocols import ClientRule
from consilience.core.settings import Invalid, check
from consilience.core.task import Task
from consilience.core.tree import Tree

C = TypeVar("C")
Reasons = Mapping[type, str]
RoundKeys = Callable[[int], bytes]
"""Gives the key of a round, which counts from 1; a second call for the same round may give another."""


def capability(part: object, protocol: type[C]) -> C | None:
    """The part itself if it has the capability, else the nearest wrapped part that has it; None if none has."""
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
        """Refuse a setting of another type, and a part whose behaviour would be lost."""
        check(self)
        for part in self.wrapped:
            for protocol, reason in self.refuses.items():
                if capability(part, protocol) is not None:
                    raise Invalid(f"{type(self).__name__}.{self.holds} = {type(part).__name__} {reason}")


# --- selection -------------------------------------------------------------------------------------------------------


class SelectionCapability(Protocol):
    """Optional behaviour of a selection."""


@runtime_checkable
class QueriesBeforeSelection(SelectionCapability, Protocol):
    """A selection that needs client losses at the current model before it chooses; they are in `pool.losses`."""

    def queries(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """Ascending ids of the clients to query."""
        ...


@runtime_checkable
class ChoosesCount(SelectionCapability, Protocol):
    """A selection of a fixed number of clients."""

    @property
    def count(self) -> int | None:
        """The number of clients; None if a fraction is given instead."""
        ...


@runtime_checkable
class PoolsData(SelectionCapability, Protocol):
    """A selection for one client that holds all the data."""

    @property
    def pools_data(self) -> bool:
        """Whether runs pool the federation into one client."""
        ...


# --- client rule -----------------------------------------------------------------------------------------------------


class ClientCapability(Protocol):
    """Optional behaviour of a client rule."""


@runtime_checkable
class PreTrainingPass(ClientCapability, Protocol):
    """A client rule with a pass over its rows before training; the result is in `message["seen"]` and is never sent."""

    @property
    def pre_training(self) -> ClientRule:
        """The rule of that pass; it does not train and receives the same message."""
        ...


@runtime_checkable
class PostTrainingPass(ClientCapability, Protocol):
    """A client rule with a pass over its rows after training, whose result is added to the reply."""

    @property
    def post_training(self) -> ClientRule:
        """The rule of that pass, which does not train: `message["model"]` is the trained model, `message["received"]`
        the shared broadcast."""
        ...


@runtime_checkable
class PersonalRule(ClientCapability, Protocol):
    """A client rule whose clients may have personal models, which federated evaluation also tests."""

    @property
    def is_personal(self) -> bool:
        """Whether clients have personal models."""
        ...

    def personal(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """This client's personal model."""
        ...


@runtime_checkable
class KeepsLayers(ClientCapability, Protocol):
    """A client rule that may keep some leaves of the model in the client's memory and never send them."""

    @property
    def personal_layers(self) -> object | None:
        """The setting that names them; None if no leaf is kept."""
        ...

    def kept_leaves(self, model: Tree) -> frozenset[str]:
        """Names of the kept leaves."""
        ...

    def completed(self, model: Tree, memory: Tree) -> Tree:
        """A received or sent model with this client's kept leaves filled in."""
        ...


@runtime_checkable
class ChecksTask(ClientCapability, Protocol):
    """A client rule, a term of its objective, or a server rule, that does not support every model and kind of task."""

    def check_against(self, task: Task) -> None:
        """Raise `Invalid`, with what is missing, before any training."""
        ...


@runtime_checkable
class PreparesTask(ClientCapability, Protocol):
    """A client rule that trains a modified model, such as one with more frozen parts or with added parts."""

    def prepare(self, task: Task) -> Task:
        """The task with the modified model; a task that is already prepared is returned unchanged."""
        ...


@runtime_checkable
class ChecksRows(ClientCapability, Protocol):
    """A client rule that supports only some shapes and types of features."""

    def check_rows(self, x: Any) -> None:
        """Raise `Invalid` for rows of shapes or types that it cannot work with, before any training."""
        ...


def own_model_of(client: ClientRule) -> PersonalRule | None:
    """The rule that gives the clients' personal models, if they have any."""
    found = capability(client, PersonalRule)
    return found if found is not None and found.is_personal else None


# --- channel ---------------------------------------------------------------------------------------------------------


class ChannelCapability(Protocol):
    """Optional behaviour of a channel."""


@runtime_checkable
class SumsOnly(ChannelCapability, Protocol):
    """A channel that may deliver only the sum of all replies."""

    @property
    def sums_only(self) -> bool:
        """Whether it does."""
        ...


@runtime_checkable
class HasForm(ChannelCapability, Protocol):
    """A channel that sends something other than a full model."""

    @property
    def form(self) -> str:
        """What it sends: "dense" updates, "sparse" values and indices, integer "codes", or "" for a full model."""
        ...


@runtime_checkable
class HasFeedback(ChannelCapability, Protocol):
    """A channel that may use error feedback: what it does not send now is added to a later update."""

    @property
    def feedback(self) -> bool:
        """Whether it does."""
        ...


# --- server rule -----------------------------------------------------------------------------------------------------


class ServerCapability(Protocol):
    """Optional behaviour of a server rule."""


@runtime_checkable
class Buffers(ServerCapability, Protocol):
    """A server rule that updates after `buffer` replies, while other clients keep working."""

    @property
    def buffer(self) -> int:
        """Replies per round."""
        ...

    @property
    def concurrency(self) -> int | None:
        """Clients at work at the same time; None: all that the selection chooses."""
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
        """The key of a round, which counts from 1: from `keys`, or from the rule's own source."""
        ...


@runtime_checkable
class ChecksSurroundings(ServerCapability, Protocol):
    """A server rule whose guarantee holds only for some configurations, which it checks before a run starts."""

    def check_surroundings(self, algorithm: Any, engine: Any, limits: Any) -> None:
        """Raise `Invalid`, with name and reason, for a part, environment or limit that breaks the guarantee."""
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
    """A server rule that trains the model itself, on data in the replies, after `update`."""

    def train(self, task: Task, state: Tree, cohort: Cohort) -> Tree:
        """The state with the trained model."""
        ...


@runtime_checkable
class ReceivesSizes(ServerCapability, Protocol):
    """A server rule that receives every client's number of rows before round 0."""

    @property
    def needs_sizes(self) -> bool:
        """False if the sizes are optional."""
        ...

    def receive_sizes(self, state: Tree, sizes: np.ndarray) -> Tree:
        """The state, of the same structure, updated with the [K] client sizes."""
        ...


@runtime_checkable
class ReceivesSchedule(ServerCapability, Protocol):
    """A server rule whose broadcast depends on how many local steps each selected client will do."""

    def broadcast_for(self, state: Tree, ids: np.ndarray, examples: Tensor, steps: np.ndarray) -> Broadcast:
        """The broadcast to selected clients with [m] rows and [m] planned steps (0: no reply will arrive)."""
        ...
