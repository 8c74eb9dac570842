"""The four parts of an algorithm, and the engine that moves trees between them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from consilience.core.exchange import Broadcast, Cohort, Notes, Pool, WaitPolicy
from consilience.core.plans import Batch, Work
from consilience.core.task import Task
from consilience.core.tree import Tree


@runtime_checkable
class Selection(Protocol):
    """Who takes part."""

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """Ascending client ids of this round: a function of its arguments alone."""
        ...


@runtime_checkable
class QueriesBeforeSelection(Protocol):
    """A selection that wants losses at the current model before it chooses: they come in `pool.losses`."""

    def queries(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """Ascending ids of the clients to ask."""
        ...


@runtime_checkable
class ClientRule(Protocol):
    """What a client does: a fold over its batches, pure and vmappable, for one client at a time.

    `message` is the broadcast as this client sees it, `memory` is its own tree, which never leaves it.
    """

    @property
    def work(self) -> Work:
        """Passes and batch size; the engine draws the batches."""
        ...

    def init(self, start: Tree) -> Tree:
        """The memory of a client that has never taken part ({} if it keeps none)."""
        ...

    def begin(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """The carry before the first step."""
        ...

    def step(self, task: Task, carry: Tree, batch: Batch, message: Tree, memory: Tree) -> Tree:
        """The carry after one batch: same structure, shapes and dtypes."""
        ...

    def end(self, task: Task, carry: Tree, message: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """(reply, memory) after the last step."""
        ...


@runtime_checkable
class PreTrainingPass(Protocol):
    """A client rule that looks at its rows before it begins: what it finds is in `message["seen"]`, and stays home."""

    @property
    def pre_training(self) -> ClientRule:
        """A rule whose work does not train, given the same message."""
        ...


@runtime_checkable
class PersonalRule(Protocol):
    """A client rule whose clients may have models of their own: federated evaluation tests these, too."""

    @property
    def is_personal(self) -> bool:
        """Whether they have."""
        ...

    def personal(self, task: Task, message: Tree, memory: Tree) -> Tree:
        """The model that this client would use."""
        ...


@runtime_checkable
class Channel(Protocol):
    """What happens to a reply in transit."""

    def init(self, start: Tree) -> Tree:
        """What a client's half remembers before its first reply ({} if nothing)."""
        ...

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """Client half (clip, noise, quantise, sparsify, attack): (what is sent, memory), for one client at a time."""
        ...

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Server half; `received` is what the cohort's clients were sent, `personal` in the cohort's order."""
        ...


@runtime_checkable
class ServerRule(Protocol):
    """What the server does: pure."""

    @property
    def needs_each_reply(self) -> bool:
        """False when a sum of replies, with weights known beforehand, is all it reads (so a secure sum would do)."""
        ...

    def init(self, start: Tree, clients: int) -> Tree:
        """The server's state before round 0."""
        ...

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """What the chosen clients are sent."""
        ...

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The state after the replies, and what to report (such as the aggregation weights)."""
        ...

    def model(self, state: Tree) -> Tree:
        """What to evaluate and ship."""
        ...


@runtime_checkable
class Buffers(Protocol):
    """A server rule that moves as soon as `buffer` replies are in, while other clients go on working."""

    @property
    def buffer(self) -> int:
        """Replies to a round."""
        ...

    @property
    def concurrency(self) -> int | None:
        """Clients at work at any time; None: all that the selection names."""
        ...


@runtime_checkable
class MovesWithoutReplies(Protocol):
    """A server rule that moves in every round, also in one without replies, for which `update` gets an empty cohort."""

    @property
    def moves_without_replies(self) -> bool:
        """Whether it does."""
        ...


@runtime_checkable
class DrawsSecretly(Protocol):
    """A server rule whose draws nobody may repeat: it and the selection find a key of the round in their arguments."""

    @property
    def noise_seed(self) -> int | None:
        """None: every key is fresh. Else the seed of all keys, with which everyone can repeat the draws."""
        ...


@runtime_checkable
class ChecksSurroundings(Protocol):
    """A server rule that keeps its promise only in some surroundings, and is shown them before a run starts."""

    def check_surroundings(self, algorithm: Any, engine: Any, limits: Any) -> None:
        """Refuse, by name and with the reason, what breaks the promise: parts, environment, limits."""
        ...


@runtime_checkable
class TrainsModel(Protocol):
    """A server rule that trains the model itself, on what the replies hold, after `update` has filed them."""

    def train(self, task: Task, state: Tree, cohort: Cohort) -> Tree:
        """The state with the trained model."""
        ...


@runtime_checkable
class ReceivesSizes(Protocol):
    """A server rule that is told, before round 0, how many rows every client has."""

    def receive_sizes(self, state: Tree, sizes: np.ndarray) -> Tree:
        """The state, of the same structure, with [K] sizes known."""
        ...


@runtime_checkable
class ReceivesSchedule(Protocol):
    """A server rule that must know, when it sends the model, how many steps each chosen client will do."""

    def broadcast_for(self, state: Tree, ids: np.ndarray, examples: Tensor, steps: np.ndarray) -> Broadcast:
        """What the chosen clients, with [m] rows and [m] steps ahead (0: will not be heard), are sent."""
        ...


@runtime_checkable
class PostTrainingPass(Protocol):
    """A client rule that adds to its reply what a look at its rows with its own trained model shows."""

    @property
    def post_training(self) -> ClientRule:
        """A rule whose work does not train; it finds the trained model in `message["model"]`, and what had been sent to
        all in `message["received"]`."""
        ...


class Engine(Protocol):
    """Where clients run. It owns their memories and draws their batches; it knows no algorithm."""

    @property
    def sizes(self) -> np.ndarray:
        """[K] rows of every client."""
        ...

    def start(self) -> Tree:
        """The initial model."""
        ...

    def available(self, round: int, seed: int) -> np.ndarray:
        """[K] who could take part."""
        ...

    def exchange(
        self,
        client: ClientRule,
        channel: Channel,
        broadcast: Broadcast,
        ids: np.ndarray,
        *,
        round: int,
        seed: int,
    ) -> Cohort:
        """Send, let the clients work, collect what arrives."""
        ...

    def recall(self) -> Tree:
        """Every client's memory, to be saved."""
        ...

    def restore(self, memory: Tree) -> None:
        """Put saved memories back."""
        ...


@runtime_checkable
class HasTask(Protocol):
    """An engine beside a server that can run the model itself."""

    @property
    def task(self) -> Task:
        """What is learned."""
        ...


@runtime_checkable
class KeepsTime(Protocol):
    """An engine with a simulated clock; in others, replies take no time."""

    @property
    def wait_policy(self) -> WaitPolicy:
        """How long the server waits for replies."""
        ...

    def seconds(
        self,
        client: ClientRule,
        channel: Channel,
        broadcast: Broadcast,
        ids: np.ndarray,
        *,
        round: int,
        seed: int,
    ) -> np.ndarray:
        """[m] simulated seconds from sending the broadcast to having each reply."""
        ...
