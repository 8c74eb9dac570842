"""The four parts of an algorithm, and the engine that moves trees between them; optional behaviour: `capabilities`."""

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
    """Who takes part."""

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        """Ascending client ids of this round: a function of its arguments alone."""
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
        """False when a sum of replies, with weights known beforehand, is all it reads (so a secure sum is enough)."""
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


class Engine(Protocol):
    """Where clients run: what the loop needs. It keeps their memory and draws their batches; it knows no algorithm."""

    @property
    def sizes(self) -> np.ndarray:
        """[K] rows of every client."""
        ...

    def start(self) -> Tree:
        """The initial model."""
        ...

    def available(self, round: int, seed: int) -> np.ndarray | AllBut:
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


class RunnerEngine(Engine, Protocol):
    """An engine that a run in a folder can use: besides what the loop needs, what is tested, saved and closed."""

    @property
    def task(self) -> Task:
        """The model and its loss, with constants on the server's device."""
        ...

    @property
    def test_rows(self) -> Rows | None:
        """Test rows on the server's device; None: the server has none, and clients test on their own."""
        ...

    @property
    def test_sizes(self) -> np.ndarray | None:
        """[K] test rows of every client; None where there are none."""
        ...

    @property
    def resolved_settings(self) -> dict[str, Any]:
        """Engine settings that this machine has decided or measured so far: a repetition needs them for equal bits."""
        ...

    def place(self, values: Tree) -> Tree:
        """A tree that was saved, on the server's device."""
        ...

    def close(self) -> None:
        """End what the engine has started."""
        ...


@runtime_checkable
class HasTask(Protocol):
    """An engine whose server can run the model itself."""

    @property
    def task(self) -> Task:
        """What is learned."""
        ...


@runtime_checkable
class NamesEmptyClients(Protocol):
    """An engine that knows, without looking at all clients in every round, which have no rows."""

    @property
    def empty(self) -> np.ndarray:
        """Ascending ids of the clients without training rows."""
        ...


@runtime_checkable
class PlansSteps(Protocol):
    """An engine that knows before a round how many steps each client will do."""

    def planned(self, client: ClientRule, ids: np.ndarray, *, round: int, seed: int) -> np.ndarray:
        """[m] steps that clients will do in a round's exchange; 0 for clients whose reply will not arrive."""
        ...


@runtime_checkable
class PreparesAhead(Engine, Protocol):
    """An engine that can draw the batches of a round while its device works on the round before."""

    @property
    def prepares_ahead(self) -> bool:
        """Whether that would save time."""
        ...

    def prepare_round(self, client: ClientRule, ids: np.ndarray, *, round: int, seed: int) -> None:
        """These clients will probably be asked next."""
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
