"""FedDC's penalty."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from consilience.client.terms.term import Context
from consilience.core.plans import Batch
from consilience.core.settings import NonNegative, check
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class DriftCorrected:
    """alpha/2 |h_i + w - w_received|^2: the client, corrected by its drift h_i, stays near the global model."""

    alpha: NonNegative = 0.1
    whole_model = True  # it corrects every parameter

    def __post_init__(self) -> None:
        check(self)

    @property
    def needs(self) -> tuple[str, ...]:
        """The memory it reads."""
        return ("drift",)

    def __call__(self, params: Tree, context: Context, batch: Batch) -> Tensor:
        """The penalty; its gradient is alpha (h_i + w - w_received)."""
        anchor, drift = context.message["model"]["params"], context.memory["drift"]
        squares = [(drift[name] + value - anchor[name]).square().sum() for name, value in params.items()]
        return 0.5 * self.alpha * sum(squares[1:], squares[0])
