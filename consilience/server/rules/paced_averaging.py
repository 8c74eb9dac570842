"""DUW-FedNova's server: it scales each client's steps so that all clients make equal progress."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from consilience.core.capabilities import Wraps
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.tree import Tree
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.averaging.steps.plain import Replace
from consilience.server.averaging.weighting.by_size import ByExamples
from consilience.server.protocols import Combine, Step, Weighting


@dataclass(frozen=True, kw_only=True)
class PacedAveraging(Wraps):
    """`Averaging`, which sends every client its pace tau_eff / tau_k, where tau_eff = sum_k (N_k / N) tau_k.

    tau_k is the planned number of steps of client k, which must be known before the round. A client whose reply will
    not arrive has tau_k = 0, also in tau_eff.
    """

    weighting: Weighting = field(default_factory=ByExamples)
    combine: Combine = field(default_factory=WeightedMean)
    step: Step = field(default_factory=Replace)
    holds = "averaging"

    @property
    def averaging(self) -> Averaging:
        """The server that does the averaging."""
        return Averaging(weighting=self.weighting, combine=self.combine, step=self.step)

    @property
    def needs_each_reply(self) -> bool:
        """Whether any of its parts looks at single replies."""
        return self.averaging.needs_each_reply

    def init(self, start: Tree, clients: int) -> Tree:
        """As `Averaging`."""
        return self.averaging.init(start, clients)

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The global model, with paces for equal work."""
        return self.broadcast_for(state, ids, torch.ones(len(ids)), np.ones(len(ids)))

    def broadcast_for(self, state: Tree, ids: np.ndarray, examples: Tensor, steps: np.ndarray) -> Broadcast:
        """The global model to all, to each its pace."""
        device = next(iter(state["model"]["params"].values())).device
        return Broadcast(shared={"model": state["model"]}, personal={"pace": paces(examples, steps).to(device)})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The next global model."""
        return self.averaging.update(state, cohort)

    def model(self, state: Tree) -> Tree:
        """The global model."""
        return state["model"]


def paces(examples: Tensor, steps: np.ndarray) -> Tensor:
    """[m] tau_eff / tau_k; 1 for clients without steps."""
    taus = torch.from_numpy(np.asarray(steps)).to(torch.float64)
    effective = (examples.cpu().to(torch.float64) * taus).sum() / examples.sum().clamp(min=1).cpu()
    return torch.where(taus > 0, effective / taus.clamp(min=1), 1.0)
