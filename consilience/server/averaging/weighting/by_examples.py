"""FedAvg's weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from consilience.core.exchange import Cohort, Notes
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class ByExamples:
    """N_k / N over the clients that replied."""

    @property
    def needs_each_reply(self) -> bool:
        """Counts are enough."""
        return False

    def init(self, start: Tree, clients: int) -> Tree:
        """No state."""
        return {}

    def weigh(self, cohort: Cohort, model: Tree, state: Tree) -> tuple[Tensor, Tree, Notes]:
        """Shares of the examples."""
        return cohort.examples / cohort.examples.sum(), state, {}
