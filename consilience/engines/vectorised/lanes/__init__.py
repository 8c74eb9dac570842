"""Ways to run a group's local steps; every lane gives the same result."""

from __future__ import annotations

from typing import Protocol

from consilience.core.federation import Rows
from consilience.core.plans import Plan
from consilience.core.tree import Tree
from consilience.engines.vectorised.program import Context, Program


class Lane(Protocol):
    """Runs all steps of a group of clients."""

    def fold(self, program: Program, carry: Tree, context: Context, plan: Plan, store: Rows) -> Tree:
        """Stacked carries after the last step, in memory of their own; clients with the most steps come first.

        Counts the clients in `core.progress`.
        """
        ...
