"""The usual server: weigh the replies, merge them, move."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.tree import Tree
from consilience.server.combining.weighted_mean import WeightedMean
from consilience.server.protocols import Combine, Step, Weighting
from consilience.server.steps.replace import Replace
from consilience.server.weighting.by_examples import ByExamples


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """One global model; `weighting` puts replies on the simplex, `combine` merges them, `step` moves the parameters."""

    weighting: Weighting = field(default_factory=ByExamples)
    combine: Combine = field(default_factory=WeightedMean)
    step: Step = field(default_factory=Replace)

    @property
    def needs_each_reply(self) -> bool:
        """Whether any of its parts looks at single replies."""
        return self.weighting.needs_each_reply or self.combine.needs_each_reply

    def init(self, start: Tree, clients: int) -> Tree:
        """The start model and whatever the parts keep."""
        weighting, step = self.weighting.init(start, clients), self.step.init(start["params"])
        return {"model": start, "weighting": weighting, "step": step}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The global model, to all."""
        return Broadcast(shared={"model": state["model"]})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The next global model."""
        model = state["model"]
        weights, weighting, notes = self.weighting.weigh(cohort, model, state["weighting"])
        merged = self.combine.merge(cohort.reply["model"], weights)
        params, step = self.step.move(model["params"], merged["params"], state["step"])
        moved = {"params": params, "buffers": merged["buffers"]}
        return {"model": moved, "weighting": weighting, "step": step}, {"weights": weights, **notes}

    def model(self, state: Tree) -> Tree:
        """The global model."""
        return state["model"]
