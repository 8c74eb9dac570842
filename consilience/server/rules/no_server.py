"""A server that does nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class NoServer:
    """Sends nothing; its model stays the initial one."""

    needs_each_reply = False  # it reads none

    def init(self, start: Tree, clients: int) -> Tree:
        """The initial model."""
        return {"model": start}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """Nothing."""
        return Broadcast(shared={})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """No change."""
        return state, {}

    def model(self, state: Tree) -> Tree:
        """The initial model."""
        return state["model"]
