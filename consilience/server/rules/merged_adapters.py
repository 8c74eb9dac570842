"""FLoRA's server: the clients' adapters are merged exactly into the layers, and every round starts new ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from consilience.core import rng, tree
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.settings import Checked, Invalid
from consilience.core.tree import Tree
from consilience.layers.adapters import LORA, Factors, Pair, others, pairs_in, pairs_of, product
from consilience.server.averaging.averaging import Averaging
from consilience.server.averaging.combining.redecomposed import merge_by, stack
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.averaging.steps.plain import Replace
from consilience.server.averaging.weighting.by_size import ByExamples
from consilience.server.protocols import Combine, Step, Weighting, read_by


@dataclass(frozen=True, kw_only=True)
class MergedAdapters(Checked):
    """D <- D + sum_k weight_k B_k A_k for every adapted layer, whose weight is W + scaling D (Wang et al. 2024).

    The server's model is the dense D, and so are the clients' models D + B_k A_k that `weighting`, `combine` and `step`
    see, all in the place of the factors. Each round begins with B = 0 and a new A, normal numbers as large as those of
    the initial A.
    """

    weighting: Weighting = field(default_factory=ByExamples)
    combine: Combine = field(default_factory=WeightedMean)
    step: Step = field(default_factory=Replace)
    factors: Factors = LORA
    needs_each_reply = True  # a product of sums is not the sum of the products

    @property
    def reads(self) -> tuple[str, ...]:
        """What the weighting reads of the replies."""
        return read_by(self.weighting)

    @property
    def averaging(self) -> Averaging:
        """What keeps the dense model's state."""
        return Averaging(weighting=self.weighting, combine=self.combine, step=self.step)

    def init(self, start: Tree, clients: int) -> Tree:
        """The start model, its adapters merged: unless B is 0 already, that is other numbers for the same model."""
        pairs = pairs_of(start["params"], self.factors)
        layers = [pair.key for pair in pairs]
        if any(pair.merged not in start["buffers"] for pair in pairs) or len(set(layers)) < len(layers):
            raise Invalid(
                "the model has no room for merged products, or two adapters in one layer: give the engine "
                "algorithm.prepared(task), of a model with one adapter a layer"
            )
        merged = {pair: start["buffers"][pair.merged] + product(start["params"], pair) for pair in pairs}
        model = {**self._rest(start, pairs)}
        model["params"] = {**model["params"], **{pair.key: value for pair, value in merged.items()}}
        state = self.averaging.init(model, clients)
        a = {pair.a: start["params"][pair.a] for pair in pairs}
        return {
            **state,
            "a": a,
            "first_a": a,
            "b": {pair.b: torch.zeros_like(start["params"][pair.b]) for pair in pairs},
        }

    def broadcast(self, state: Tree, ids: np.ndarray) -> Broadcast:
        """The dense model, and adapters to begin with."""
        return Broadcast(shared={"model": self._model(state, state["a"])})

    def update(self, state: Tree, cohort: Cohort) -> tuple[Tree, Notes]:
        """The next dense model, and the next A."""
        before, replies = state["model"], tree.here(cohort.reply["model"])
        pairs = pairs_in({**state["a"], **state["b"]}, self.factors)
        rest = self._rest(replies, pairs)
        sees_products = self.weighting.needs_each_reply or not isinstance(self.combine, WeightedMean)
        models = rest
        if sees_products:
            dense = {pair.key: before["params"][pair.key] + product(replies["params"], pair) for pair in pairs}
            models = {**rest, "params": {**rest["params"], **dense}}
        sent = {kind: {name: before[kind][name] for name in named} for kind, named in models.items()}
        seen = replace(cohort, reply={**cohort.reply, "model": models})
        weights, weighting, notes = self.weighting.weigh(seen, sent, state["weighting"])
        merged = merge_by(self.combine, models, weights, sent)
        if not sees_products:
            sums = {pair.key: _sum(before["params"][pair.key], replies["params"], pair, weights) for pair in pairs}
            merged = {**merged, "params": {**merged["params"], **sums}}
        merged = {kind: {**named, **merged[kind]} for kind, named in before.items()}  # personal layers are unchanged
        params, step = self.step.move(before["params"], merged["params"], state["step"])
        after = {"model": {"params": params, "buffers": merged["buffers"]}, "weighting": weighting, "step": step}
        fixed = {"a": self._new_a(state["first_a"], cohort), "first_a": state["first_a"], "b": state["b"]}
        return {**after, **fixed}, {"weights": weights, **notes}

    def model(self, state: Tree) -> Tree:
        """The dense model; its adapters, which add nothing, are the first ones."""
        return self._model(state, state["first_a"])

    def _rest(self, model: Tree, pairs: tuple[Pair, ...]) -> Tree:
        """What is neither factor nor merged product."""
        products = {pair.merged for pair in pairs}
        buffers = {name: value for name, value in model["buffers"].items() if name not in products}
        return {**model, "params": others(model["params"], pairs), "buffers": buffers}

    def _model(self, state: Tree, a: Tree) -> Tree:
        """The model as clients and evaluation know it."""
        pairs = pairs_in({**a, **state["b"]}, self.factors)
        params = {**state["model"]["params"]}
        merged = {pair.merged: params.pop(pair.key) for pair in pairs}
        return {"params": {**params, **a, **state["b"]}, "buffers": {**state["model"]["buffers"], **merged}}

    def _new_a(self, first: Tree, cohort: Cohort) -> Tree:
        """Normal numbers as large as the first A, drawn from the run's seed and the round."""
        # Paper: adapters are initialised anew, B = 0 and A normal, by each client for itself. Here: one A for all,
        # which the server draws, so that all begin from one model.
        drawn = {}
        for number, (name, value) in enumerate(first.items()):
            key = torch.tensor(rng.key(cohort.seed, "adapters", cohort.round, number), device=value.device)
            size = value.to(torch.float64).square().mean().sqrt()
            drawn[name] = (size * rng.normals(key, value.numel()).reshape(value.shape)).to(value.dtype)
        return drawn


def _sum(before: Tensor, params: Tree, pair: Pair, weights: Tensor) -> Tensor:
    """D + sum_k weight_k B_k A_k, by one product of the stacked factors."""
    a, b = stack(params[pair.a], params[pair.b], weights)
    return (before.to(torch.float64) + b @ a).to(before.dtype)
