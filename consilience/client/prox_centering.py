"""FedSplit's client, as two parts of local training: the prox step at 2x - z, and the centring that moves z."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from consilience.client.memory.memory import TrainingEnd
from consilience.client.terms.term import Context
from consilience.core.plans import Batch
from consilience.core.settings import Checked, Fraction, Positive
from consilience.core.tree import Tree, map_leaves

Z = "z"  # key of the splitting variable in a client's memory, or in its personal message if the server keeps it


@dataclass(frozen=True, kw_only=True)
class ReflectedProximal(Checked):
    """1/(2 step) |w - (2x - z)|^2, x the received model: with the loss, the subproblem of prox at 2x - z.

    z is the client's memory, or with `sent` comes from a server that keeps it.
    """

    step: Positive
    sent: bool = False
    whole_model = True  # the server's x is the mean of the z's, leaf by leaf

    @property
    def needs(self) -> tuple[str, ...]:
        """The memory it reads."""
        return () if self.sent else (Z,)

    @property
    def reads_broadcast(self) -> tuple[str, ...]:
        """What the server must send."""
        return (Z,) if self.sent else ()

    def __call__(self, params: Tree, context: Context, batch: Batch) -> Tensor:
        """The penalty; its gradient is (w - 2x + z) / step."""
        x, z = context.message["model"]["params"], (context.message if self.sent else context.memory)[Z]
        squares = [(value - (2 * x[name] - z[name])).square().sum() for name, value in params.items()]
        return sum(squares[1:], squares[0]) / (2 * self.step)


@dataclass(frozen=True, kw_only=True)
class Centring(Checked):
    """z <- z + 2 relaxation (w - x), where w is the trained and x the received model."""

    relaxation: Fraction = 1.0
    name = Z  # terms read it as `z`

    def init(self, start: Tree) -> Tree:
        """z = x = the initial model."""
        return dict(start["params"])

    def update(self, old: Tree, done: TrainingEnd) -> tuple[Tree, Tree]:
        """z changes in proportion to the model, so the server can compute it from the reply's model."""
        ended, began = done.model["params"], done.message["model"]["params"]
        return map_leaves(lambda z, w, x: z + 2 * self.relaxation * (w - x), old, ended, began), {}
