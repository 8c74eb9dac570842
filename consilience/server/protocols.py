"""The three parts of an averaging server."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.tree import Tree


@runtime_checkable
class Weighting(Protocol):
    """How much each reply counts."""

    @property
    def needs_each_reply(self) -> bool:
        """False when the weights depend on example counts alone."""
        ...

    def init(self, start: Tree, clients: int) -> Tree:
        """What it remembers before round 0 ({} if nothing)."""
        ...

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """([m] float64 weights that sum to one, state, what to report); `model` is what was broadcast."""
        ...


@runtime_checkable
class Combine(Protocol):
    """How weighted replies become one model."""

    @property
    def needs_each_reply(self) -> bool:
        """False for the weighted mean."""
        ...

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> one model."""
        ...


@runtime_checkable
class Step(Protocol):
    """How far the server moves towards the merged model."""

    def init(self, params: Tree) -> Tree:
        """Its state before round 0 ({} if none)."""
        ...

    def move(self, params: Tree, merged: Tree, state: Tree) -> tuple[Tree, Tree]:
        """(new parameters, state)."""
        ...
