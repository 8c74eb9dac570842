"""One thing that a client remembers between its rounds."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from consilience.client.solvers import Solver
from consilience.core.tree import Tree


class TrainingEnd(NamedTuple):
    """How local training ended: what a memory is updated from."""

    model: Tree  # after the last step
    message: Tree  # what the server sent: message["model"] is where the client started
    memory: Tree  # everything it remembered when the round began, by the parts' names
    steps: Tensor  # float64 scalar: steps done
    solver: Solver


@runtime_checkable
class Memory(Protocol):
    """Terms find it in `context.memory[name]`; it never leaves the client.

    What a part reads of the message beside the model, it declares as `Hears`; see `Says` and `ChecksSolver`, too.
    """

    @property
    def name(self) -> str:
        """Its key in the client's memory."""
        ...

    def init(self, start: Tree) -> Tree:
        """Before the client's first round."""
        ...

    def update(self, old: Tree, done: TrainingEnd) -> tuple[Tree, Tree]:
        """(what to remember, what to add to the reply ({} if nothing)), the same structure every time."""
        ...


@runtime_checkable
class Says(Protocol):
    """A memory that adds to the reply."""

    @property
    def says(self) -> tuple[str, ...]:
        """The names it adds."""
        ...


@runtime_checkable
class ChecksSolver(Protocol):
    """A memory that not every solver will do for."""

    def check_solver(self, solver: Solver) -> None:
        """Refuse one that it cannot work with."""
        ...


@runtime_checkable
class OwnModel(Protocol):
    """A memory that is a whole model, and the one that the client would use."""

    @property
    def is_own_model(self) -> bool:
        """Always True."""
        ...
