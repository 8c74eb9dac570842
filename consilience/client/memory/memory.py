"""One thing that a client remembers between its rounds."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from consilience.client.solvers import Solver
from consilience.core.tree import Tree


class Done(NamedTuple):
    """The end of a client's round."""

    model: Tree  # after the last step
    message: Tree  # what the server sent: message["model"] is where the client started
    memory: Tree  # everything it remembered when the round began, by the parts' names
    steps: Tensor  # float64 scalar: steps done
    solver: Solver


@runtime_checkable
class Memory(Protocol):
    """Terms find it in `context.memory[name]`; it never leaves the client.

    A part may declare `hears` (names that the server's ledgers must tell) and `says` (names it adds to the reply), and
    have `check_solver(solver)`, which refuses solvers it cannot work with.
    """

    @property
    def name(self) -> str:
        """Its key in the client's memory."""
        ...

    def init(self, start: Tree) -> Tree:
        """Before the client's first round."""
        ...

    def update(self, old: Tree, done: Done) -> tuple[Tree, Tree]:
        """(what to remember, what to add to the reply ({} if nothing)), the same structure every time."""
        ...


@runtime_checkable
class OwnModel(Protocol):
    """A memory that is a whole model, and the one that the client would use."""

    @property
    def is_own_model(self) -> bool:
        """Always True."""
        ...
