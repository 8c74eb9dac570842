"""FedProx's proximal term."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from consilience.client.terms.term import Context
from consilience.core.plans import Batch
from consilience.core.settings import Checked, NonNegative
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Proximal(Checked):
    """mu/2 |w - w_received|^2 over the parameters: keeps the client's model near the received one."""

    mu: NonNegative = 0.1

    def __call__(self, params: Tree, context: Context, batch: Batch) -> Tensor:
        """The penalty; its gradient is mu (w - w_received)."""
        anchor = context.message["model"]["params"]
        squares = [(value - anchor[name]).square().sum() for name, value in params.items()]
        return 0.5 * self.mu * sum(squares[1:], squares[0])
