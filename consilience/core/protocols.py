"""Interfaces of the four parts of an algorithm and of the engine; optional behaviour is in `capabilities`."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from consilience.core.client_flags import AllBut
from consilience.core.exchange import Broadcast, Cohort, Notes, Pool, WaitPolicy
from consilience.core.federation import Rows
from consilience.core.plans import Batch, Work
from consilience.core.task import Task
from consilience.core.tree import Tree


@runtime_checkable
class Selection(Protocol):
    """Chooses the clients of a round."""

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """Ascending client ids of this round; a pure function of the arguments."""
        ...


@runtime_checkable
class ClientRule(Protocol):
    """A client's local work: a fold over its batches, written for one client as pure functions that vmap can batch.

    `message` is the broadcast as this client receives it, `memory` its own tree, which is never sent.
    """

    @property
    def work(self) -> Work:
        """Epochs and batch size; the engine draws the batches."""
        ...

    def init(self, start: Tree) -> Tree:
        """The memory of a client before its first round ({} if it keeps none)."""
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
class Channel(Protocol):
    """Transforms replies between client and server."""

    def init(self, start: Tree) -> Tree:
        """The client half's memory before its first reply ({} if none)."""
        ...

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """Client half (clip, noise, quantise, sparsify, attack): (what is sent, memory), for one client."""
        ...

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Server half; `received` is the broadcast to the cohort's clients, `personal` in the cohort's order."""
        ...


@runtime_checkable
class ServerRule(Protocol):
    """The server's work, as pure functions."""

    @property
    def needs_each_reply(self) -> bool:
        """False if it reads only a sum of replies with weights known beforehand (so secure aggregation is possible)."""
        ...

    def init(self, start: Tree, clients: int) -> Tree:
        """The server's state before round 0."""
        ...

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The broadcast to the selected clients."""
        ...

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """(state after the replies, what to report, such as the aggregation weights)."""
        ...

    def model(self, state: Tree) -> Tree:
        """The model to evaluate and deploy."""
        ...


@runtime_checkable
class Queued(Protocol):
    """A server rule, or a part of one, that reads single replies without waiting for the device that computes them.

    Its update may be called before the replies are tested, and again without those that fail. Wrappers declare it
    themselves: they may read more than the part inside.
    """

    @property
    def queued(self) -> bool:
        """Whether all that it does with replies is queued."""
        ...


def waits_for_replies(part: Any) -> bool:
    """Whether a server rule, or a part of one, reads single replies on the host."""
    return part.needs_each_reply and not (isinstance(part, Queued) and part.queued)


class Engine(Protocol):
    """Runs clients for the training loop: keeps their memory and draws their batches, independent of the algorithm."""

    @property
    def sizes(self) -> np.ndarray:
        """[K] rows of every client."""
        ...

    def start(self) -> Tree:
        """The initial model."""
        ...

    def available(self, round: int, seed: int) -> np.ndarray | AllBut:
        """[K] which clients are available."""
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
        """Send the broadcast, run the clients, collect the replies that arrive."""
        ...

    def recall(self) -> Tree:
        """Every client's memory, for checkpoints."""
        ...

    def restore(self, memory: Tree) -> None:
        """Restore saved memories."""
        ...


class RunnerEngine(Engine, Protocol):
    """An engine for runs that are stored in a folder: adds test rows, resolved settings, checkpoints and `close`."""

    @property
    def task(self) -> Task:
        """The model and its loss, with constants on the server's device."""
        ...

    @property
    def test_rows(self) -> Rows | None:
        """Test rows on the server's device; None: the server has none, and clients test on their own rows."""
        ...

    @property
    def test_sizes(self) -> np.ndarray | None:
        """[K] test rows of every client; None if there are none."""
        ...

    @property
    def resolved_settings(self) -> dict[str, Any]:
        """Engine settings that were decided or measured on this machine; a bit-for-bit repetition needs them."""
        ...

    def place(self, values: Tree) -> Tree:
        """A saved tree, moved to the server's device."""
        ...

    def close(self) -> None:
        """Stop the processes that the engine has started."""
        ...


@runtime_checkable
class HasTask(Protocol):
    """An engine whose server can run the model itself."""

    @property
    def task(self) -> Task:
        """The model and its kind of task."""
        ...


@runtime_checkable
class NamesEmptyClients(Protocol):
    """An engine that lists the clients without rows, so that rounds need not scan all clients."""

    @property
    def empty(self) -> np.ndarray:
        """Ascending ids of the clients without training rows."""
        ...


@runtime_checkable
class PlansSteps(Protocol):
    """An engine that knows before a round how many steps each client will do."""

    def planned(self, client: ClientRule, ids: np.ndarray, *, round: int, seed: int) -> np.ndarray:
        """[m] local steps that clients will do in a round; 0 for clients whose reply will not arrive."""
        ...


@runtime_checkable
class PreparesAhead(Engine, Protocol):
    """An engine that can draw the next round's batches while its device computes the current round."""

    @property
    def prepares_ahead(self) -> bool:
        """Whether drawing ahead would save time."""
        ...

    def prepare_round(self, client: ClientRule, ids: np.ndarray, *, round: int, seed: int) -> None:
        """Prepare a round for the clients that will probably be selected."""
        ...


@runtime_checkable
class KeepsTime(Protocol):
    """An engine with a simulated clock; in other engines, replies take no time."""

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
        """[m] simulated seconds from sending the broadcast to receiving each reply."""
        ...
