"""FedNova's server: updates per step are averaged, so that clients with more steps do not bias the objective."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Decay, Invalid, check
from consilience.core.tree import Tree, map_rows
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.averaging.weighting.by_size import ByExamples
from consilience.server.protocols import Weighting, read_by


@dataclass(frozen=True, kw_only=True)
class NormalisedAveraging:
    """w <- w - tau_eff sum_k p_k (w - w_k) / |a_k|, tau_eff = sum_k p_k |a_k| (Wang et al. 2020; DUW's eqs 9-11).

    |a_k| is what a client's steps add up to: their number for plain SGD. A client that did nothing adds nothing, to
    tau_eff either. `momentum` and `shrink` (learning rate x FedProx's mu) say how local steps add up otherwise.
    """

    weighting: Weighting = field(default_factory=ByExamples)
    momentum: Decay = 0.0
    shrink: Decay = 0.0
    needs_each_reply = True  # each update is divided by its own client's steps

    def __post_init__(self) -> None:
        check(self)
        if self.momentum and self.shrink:
            raise Invalid("NormalisedAveraging knows how steps add up with momentum or with a proximal term, not both")

    @property
    def reads(self) -> tuple[str, ...]:
        """What the weighting reads of the replies."""
        return read_by(self.weighting)

    def init(self, start: Tree, clients: int) -> Tree:
        """The start model and what the weighting keeps."""
        return {"model": start, "weighting": self.weighting.init(start, clients)}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The global model to all."""
        return Broadcast(shared={"model": state["model"]})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The next global model; buffers are averaged by the plain weights."""
        model = state["model"]
        weights, weighting, notes = self.weighting.weigh(cohort, model, state["weighting"])
        length = self.length(cohort.steps).to(weights.device)  # [m] |a_k|
        effective = (weights * length).sum()
        scale = torch.where(length > 0, weights * effective / length.clamp(min=1e-12), 0.0)
        params = map_rows(_moved, cohort.reply["model"]["params"], model["params"], given=(scale,))
        buffers = WeightedMean().merge(cohort.reply["model"]["buffers"], weights)
        moved = {"model": {"params": params, "buffers": buffers}, "weighting": weighting}
        return moved, {"weights": weights, "effective_steps": effective, **notes}

    def model(self, state: Tree) -> Tree:
        """The global model."""
        return state["model"]

    def length(self, steps: np.ndarray) -> Tensor:
        """[m] |a_k|_1 of these local steps, in units of the learning rate."""
        count = torch.from_numpy(np.asarray(steps)).to(torch.float64)
        if self.momentum:
            decay = torch.as_tensor(self.momentum, dtype=torch.float64)
            return (count - decay * (1 - decay**count) / (1 - decay)) / (1 - decay)
        if self.shrink:
            return (1 - (1 - torch.as_tensor(self.shrink, dtype=torch.float64)) ** count) / self.shrink
        return count


def _moved(new: Tensor, old: Tensor, scale: Tensor) -> Tensor:
    """[...] old + sum_k scale_k (new_k - old)."""
    wide = torch.promote_types(old.dtype, torch.float32)
    delta = (new.to(wide) - old.to(wide)).reshape(len(new), -1)  # [m, P]
    return (old.to(wide) + (scale.to(wide) @ delta).reshape(old.shape)).to(old.dtype)
