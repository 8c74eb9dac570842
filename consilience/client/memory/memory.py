"""Interface of one entry of client memory."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from consilience.client.solvers import Solver
from consilience.core.tree import Tree


class TrainingEnd(NamedTuple):
    """The end of local training, from which a memory is updated."""

    model: Tree  # after the last step
    message: Tree  # the broadcast: message["model"] is the model that the client started from
    memory: Tree  # all memories at the start of the round, by name
    steps: Tensor  # float64 scalar: steps done
    solver: Solver


@runtime_checkable
class Memory(Protocol):
    """One entry of client memory: terms read it as `context.memory[name]`; it is never sent.

    A memory that reads more of the message than the model declares that with `ReadsBroadcast`; see also `AddsToReply`
    and `ChecksSolver`.
    """

    @property
    def name(self) -> str:
        """Its key in the client's memory."""
        ...

    def init(self, start: Tree) -> Tree:
        """The value before the client's first round."""
        ...

    def update(self, old: Tree, done: TrainingEnd) -> tuple[Tree, Tree]:
        """(new value, what to add to the reply ({} if nothing)), of the same structure every time."""
        ...


@runtime_checkable
class AddsToReply(Protocol):
    """A memory that adds to the reply."""

    @property
    def adds_to_reply(self) -> tuple[str, ...]:
        """Names of the added entries."""
        ...


@runtime_checkable
class ChecksSolver(Protocol):
    """A memory that does not support every solver."""

    def check_solver(self, solver: Solver) -> None:
        """Refuse an unsupported solver."""
        ...


@runtime_checkable
class OwnModel(Protocol):
    """A memory that holds the client's personal model."""

    @property
    def is_own_model(self) -> bool:
        """Always True."""
        ...
