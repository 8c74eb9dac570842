"""Weights known before training: by number of examples, or equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class ByExamples:
    """N_k / N over the clients that replied."""

    needs_each_reply = False  # counts are enough

    def init(self, start: Tree, clients: int) -> Tree:
        """No state."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """Shares of the examples."""
        return cohort.examples / cohort.examples.sum(), state, {}


@dataclass(frozen=True, kw_only=True)
class UniformWeights:
    """1/m over the m clients that replied."""

    needs_each_reply = False  # a plain sum is enough

    def init(self, start: Tree, clients: int) -> Tree:
        """No state."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """Equal shares."""
        return torch.full_like(cohort.examples, 1 / len(cohort)), state, {}
