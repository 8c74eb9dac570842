"""FedSiam-DA's dual aggregation, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Checked
from consilience.core.tree import Tree, map_rows
from consilience.server.averaging.combining.weighted_mean import weighted_mean
from consilience.server.averaging.steps.plain import Replace
from consilience.server.averaging.weighting.dual import DualWeights, cosines_to_mean, dual_weights, first_weights
from consilience.server.protocols import Step, take_step


@dataclass(frozen=True, kw_only=True)
class LayerwiseDual(Checked):
    """`DualWeights` for every layer on its own: a client may count much in one layer and little in another.

    A layer is all parameters of one module (weight and bias are one vector). Buffers, and what is reported as the
    clients' weights, have the weights of the model as a whole.
    """

    compare_on: Literal["weights", "updates"] = "weights"
    first_stage: Literal["uniform", "examples"] = "uniform"
    step: Step = field(default_factory=Replace)
    needs_each_reply = True  # cosines need every model

    def init(self, start: Tree, clients: int) -> Tree:
        """The start model and the step's state."""
        return {"model": start, "step": self.step.init(start["params"])}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The global model."""
        return Broadcast(shared={"model": state["model"]})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """Eqs (13) to (16) in every layer."""
        model, replies = state["model"], cohort.reply["model"]
        whole, _, notes = DualWeights(compare_on=self.compare_on, first_stage=self.first_stage).weigh(cohort, model, {})
        layers = {layer: self._weights(layer, names, cohort, model) for layer, names in layers_of(model).items()}
        shares = {name: layers[layer_of(name)] for name in replies["params"]}
        merged = map_rows(weighted_mean, replies["params"], shares)
        params, step = take_step(self.step, model["params"], merged, state["step"], cohort.round)
        buffers = map_rows(weighted_mean, replies["buffers"], given=(whole,))
        notes = {**notes, "weights": whole, "layer_weights": torch.stack(list(layers.values()))}  # [L, m]
        return {"model": {"params": params, "buffers": buffers}, "step": step}, notes

    def model(self, state: Tree) -> Tree:
        """The global model."""
        return state["model"]

    def _weights(self, layer: str, names: list[str], cohort: Cohort, model: Tree) -> Tensor:
        stacked = {name: cohort.reply["model"]["params"][name] for name in names}
        start = model["params"] if self.compare_on == "updates" else None
        cosine = cosines_to_mean(stacked, start, first_weights(cohort, self.first_stage))
        return dual_weights(
            cosine, cohort.ids.tolist(), f"of their {self.compare_on} in layer {layer or 'of the model'!r}"
        )


def layers_of(model: Tree) -> dict[str, list[str]]:
    """Parameter names by the module they belong to."""
    layers: dict[str, list[str]] = {}
    for name in model["params"]:
        layers.setdefault(layer_of(name), []).append(name)
    return layers


def layer_of(name: str) -> str:
    """The module that a parameter belongs to."""
    return name.rpartition(".")[0]
