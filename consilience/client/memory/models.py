"""Models in client memory: the last trained model, as a reference for terms or as the personal model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.client.memory.memory import TrainingEnd
from consilience.core.settings import Checked
from consilience.core.tree import Tree, leaves, where


@dataclass(frozen=True, kw_only=True)
class PreviousModel(Checked):
    """Keeps `{"model": ..., "known": ...}`; `known` is False until the client has trained once.

    With `report=True` the reply also holds `moved`: the distance of the new parameters from the client's previous ones,
    or from the received ones the first time. The previous model itself is not sent.
    """

    report: bool = False
    name = "previous"  # where terms find it: `context.memory["previous"]`

    @property
    def adds_to_reply(self) -> tuple[str, ...]:
        """Names that it adds to the reply."""
        return ("moved",) if self.report else ()

    def init(self, start: Tree) -> Tree:
        """The initial model, marked as not trained by the client."""
        return {"model": start, "known": torch.zeros((), dtype=torch.bool, device=next(leaves(start)).device)}

    def update(self, old: Tree, done: TrainingEnd) -> tuple[Tree, Tree]:
        """The newly trained model; a client that did no step keeps the previous one."""
        worked = done.steps > 0
        kept = {"model": where(worked, done.model, old["model"]), "known": old["known"] | worked}
        if not self.report:
            return kept, {}
        before = where(old["known"], old["model"]["params"], done.message["model"]["params"])
        return kept, {"moved": distance(done.model["params"], before)}


def distance(params: Tree, others: Tree) -> Tensor:
    """|w - v| over all parameters in float64, scaled so that no square overflows."""
    parts = [params[name].to(torch.float64) - others[name].to(torch.float64) for name in params]
    parts = [part for part in parts if part.numel()]
    largest = torch.stack([part.abs().amax() for part in parts]).amax()
    unit = torch.where(largest > 0, largest, 1.0)
    return unit * torch.stack([(part / unit).square().sum() for part in parts]).sum().sqrt()


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model at the end of the client's last round, as its personal model; the initial model before."""

    name = "trained_model"  # its key in the client's memory
    is_own_model = True  # it is the personal model

    def init(self, start: Tree) -> Tree:
        """The initial model."""
        return start

    def update(self, old: Tree, done: TrainingEnd) -> tuple[Tree, Tree]:
        """The trained model; nothing is added to the reply."""
        return done.model, {}
