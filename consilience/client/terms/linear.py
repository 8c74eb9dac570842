"""Gradient corrections: control variates, stored gradients, and FedDC's drift."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from consilience.client.terms.term import Context
from consilience.core.plans import Batch
from consilience.core.settings import Checked, Invalid, NonNegative, check
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Linear:
    """<received - remembered, w>: adds received - remembered to every gradient; either may be left out.

    `received` is the name of a server ledger, `remembered` the name of a client memory.
    """

    received: str | None = None
    remembered: str | None = None
    whole_model = True  # it corrects every parameter

    def __post_init__(self) -> None:
        check(self)
        if self.received is None and self.remembered is None:
            raise Invalid("Linear has neither received nor remembered: name a ledger, a memory, or both")

    @property
    def needs(self) -> tuple[str, ...]:
        """The memory it reads."""
        return () if self.remembered is None else (self.remembered,)

    @property
    def reads_broadcast(self) -> tuple[str, ...]:
        """The server ledger it reads."""
        return () if self.received is None else (self.received,)

    def __call__(self, params: Tree, context: Context, batch: Batch) -> Tensor:
        """The inner product over the parameters."""
        plus = None if self.received is None else context.message[self.received]
        minus = None if self.remembered is None else context.memory[self.remembered]
        products = [(_slope(plus, minus, name) * value).sum() for name, value in params.items()]
        return sum(products[1:], products[0])


def _slope(plus: Tree | None, minus: Tree | None, name: str) -> Tensor:
    if plus is None:
        assert minus is not None
        return -minus[name]
    return plus[name] if minus is None else plus[name] - minus[name]


@dataclass(frozen=True, kw_only=True)
class DriftCorrected(Checked):
    """alpha/2 |h_i + w - w_received|^2: keeps the drift-corrected client model w + h_i near the global model."""

    alpha: NonNegative = 0.1
    whole_model = True  # it corrects every parameter

    @property
    def needs(self) -> tuple[str, ...]:
        """The memory it reads."""
        return ("drift",)

    def __call__(self, params: Tree, context: Context, batch: Batch) -> Tensor:
        """The penalty; its gradient is alpha (h_i + w - w_received)."""
        anchor, drift = context.message["model"]["params"], context.memory["drift"]
        squares = [(drift[name] + value - anchor[name]).square().sum() for name, value in params.items()]
        return 0.5 * self.alpha * sum(squares[1:], squares[0])
