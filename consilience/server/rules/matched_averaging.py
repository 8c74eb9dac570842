"""FedMA's server: hidden units are matched between clients, layer by layer, before they are averaged."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Checked, Count, Invalid
from consilience.core.tree import Tree
from consilience.server.averaging.combining.weighted_mean import WeightedMean, weighted_mean
from consilience.server.averaging.weighting.by_size import ByExamples
from consilience.server.protocols import Weighting, read_by


class Layer(NamedTuple):
    """A dense or convolutional layer by the names of its leaves; `vectors` have one number for each of its units."""

    weight: str
    vectors: tuple[tuple[str, str], ...]  # (params or buffers, name): bias, and batch norm's behind it


@dataclass(frozen=True, kw_only=True)
class MatchedAveraging(Checked):
    """The mean of models whose hidden units were first permuted to match each other best.

    Layer by layer, every client's units (incoming weights and bias) are assigned to those of a reference at the least
    sum of squared distances; the reference is first the broadcast model, then the mean of the units so matched, at most
    `passes` times. The next layer's incoming weights follow, so that no client's function changes.
    """

    weighting: Weighting = field(default_factory=ByExamples)
    passes: Count = 5
    needs_each_reply = True  # units are matched client by client

    @property
    def reads(self) -> tuple[str, ...]:
        """What the weighting reads of the replies."""
        return read_by(self.weighting)

    def init(self, start: Tree, clients: int) -> Tree:
        """The start model, which must be a chain of layers."""
        chain_of(start)
        return {"model": start, "weighting": self.weighting.init(start, clients)}

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The model, to all."""
        return Broadcast(shared={"model": state["model"]})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The mean of the matched models, and how many units of each client were permuted."""
        weights, weighting, notes = self.weighting.weigh(cohort, state["model"], state["weighting"])
        matched, moved = match(tree.here(cohort.reply["model"]), weights, state["model"], self.passes)
        merged = WeightedMean().merge(matched, weights)
        return {"model": merged, "weighting": weighting}, {"weights": weights, **notes, "moved_units": moved}

    def model(self, state: Tree) -> Tree:
        """The matched mean."""
        return state["model"]


def match(models: Tree, weights: Tensor, reference: Tree, passes: int = 5) -> tuple[Tree, Tensor]:
    """(stacked models [m, ...] with their hidden units in the reference's order, [m] units that changed places)."""
    chain = chain_of(reference)
    models = {kind: dict(leaves) for kind, leaves in models.items()}
    moved = torch.zeros(len(weights), dtype=torch.int64)
    for layer, following in pairwise(chain):
        units = _units(models["params"], layer)  # [m, units, numbers]
        centre = _units({name: value.unsqueeze(0) for name, value in reference["params"].items()}, layer)[0]
        places = _assigned(units, centre, weights, passes).to(units.device)  # [m, units]: who comes to each place
        moved += (places.cpu() != torch.arange(places.shape[1])).sum(1)
        for kind, name in (("params", layer.weight), *layer.vectors):
            models[kind][name] = _taken(models[kind][name], places)
        after = models["params"][following.weight]
        each = after.shape[2] // places.shape[1]  # pixels of a channel, where a picture was flattened
        columns = (places.unsqueeze(2) * each + torch.arange(each, device=places.device)).flatten(1)
        models["params"][following.weight] = _taken(after.transpose(1, 2), columns).transpose(1, 2)
    return models, moved


def chain_of(model: Tree) -> list[Layer]:
    """The layers of a model in the order of its parameters; refused where sizes cannot follow each other."""
    params: Tree = model["params"]
    found: list[tuple[str, list[tuple[str, str]]]] = []
    for name, value in params.items():
        if value.dim() >= 2:
            found.append((name, []))
        elif value.dim() == 1 and found and len(value) == len(params[found[-1][0]]):
            found[-1][1].append(("params", name))
        else:
            raise Invalid(f"matched averaging knows weights, biases and batch norm, but not {name}: use mlp or cnn")
    if not found:
        raise Invalid("matched averaging needs a model with dense or convolutional layers")
    owners = {name.rpartition(".")[0]: place for place, (_, vectors) in enumerate(found) for _, name in vectors}
    for name, value in model["buffers"].items():
        owner = name.rpartition(".")[0]
        if value.dim() and (owner not in owners or len(value) != len(params[found[owners[owner]][0]])):
            raise Invalid(f"matched averaging knows no buffer but batch norm's, and the model has {name}")
        if value.dim():
            found[owners[owner]][1].append(("buffers", name))
    layers = [Layer(weight, tuple(vectors)) for weight, vectors in found]
    for before, after in pairwise(layers):
        units, inputs = len(params[before.weight]), params[after.weight].shape[1]
        if inputs % units or (inputs != units and params[after.weight].dim() > 2):
            raise Invalid(
                f"matched averaging needs a chain of layers, but {after.weight} takes {inputs} inputs, which cannot "
                f"come from the {units} units of {before.weight} alone: use a model such as mlp or cnn"
            )
    return layers


def _units(params: Tree, layer: Layer) -> Tensor:
    """[m, units, numbers] in float64: incoming weights, and the bias if there is one."""
    # Paper: bias and incoming weights. Here: those; batch norm behind the layer, which it does not treat, just follows.
    weight = params[layer.weight].flatten(2)
    bias = layer.weight.removesuffix("weight") + "bias"
    return torch.cat([weight, params[bias].unsqueeze(2)], 2).double() if bias in params else weight.double()


def _assigned(units: Tensor, centre: Tensor, weights: Tensor, passes: int) -> Tensor:
    """[m, units] which unit of each client comes to each place; ends early when no unit moves any more."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as problem:
        raise Invalid("fedma matches units with scipy, which is not installed: pip install scipy") from problem
    places = torch.arange(units.shape[1]).expand(len(units), -1)
    centre = centre.double()
    for number in range(passes):
        cost = (
            torch.cdist(centre.expand(len(units), -1, -1), units).square().detach().cpu().numpy()
        )  # [m, places, units]
        found = torch.from_numpy(np.stack([linear_sum_assignment(one)[1] for one in cost]))
        if number and torch.equal(found, places):
            break
        places = found
        centre = weighted_mean(_taken(units, places.to(units.device)), weights)
    return places


def _taken(stacked: Tensor, places: Tensor) -> Tensor:
    """[m, units, ...] -> the same with each client's units in its own order [m, units]."""
    return stacked[torch.arange(len(stacked), device=stacked.device).unsqueeze(1), places]
