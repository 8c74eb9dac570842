"""Search for the strength at which an attack is most harmful to a known combining rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.capabilities import capability
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.tree import Tree


@runtime_checkable
class Target(Protocol):
    """The server's combining rule, as known to the attacker."""

    @property
    def needs_each_reply(self) -> bool:
        """False for a weighted mean."""
        ...

    def merge(self, models: Tree, weights: Tensor) -> Tree:
        """Stacked models [m, ...] -> one model."""
        ...


@runtime_checkable
class TargetAround(Protocol):
    """A target that also reads the broadcast model."""

    def merge_around(self, models: Tree, weights: Tensor, centre: Tree) -> Tree:
        """Stacked models [m, ...] that started from `centre` -> one model."""
        ...


def strongest(
    attack: Callable[[float], Cohort], target: Target, honest: Tensor, received: Broadcast, tries: int
) -> float:
    """Of `tries` log-spaced strengths from 0.01 to 100, the one that moves the merged model furthest from the honest
    mean."""
    strengths = np.logspace(-2, 2, tries).tolist()
    return max(strengths, key=lambda strength: _harm(attack(strength), target, honest, received))


def _harm(cohort: Cohort, target: Target, honest: Tensor, received: Broadcast) -> float:
    """Squared distance of the merged parameters from the mean of the honest ones."""
    models = cohort.reply["model"]
    weights = torch.full_like(cohort.examples, 1 / len(cohort))
    around = capability(target, TargetAround)
    if around is not None and "model" in received.shared:
        sent = received.shared["model"]  # personal leaves are not in the replies
        merged = around.merge_around(
            models, weights, {kind: {n: sent[kind][n] for n in models[kind]} for kind in models}
        )
    else:
        merged = target.merge(models, weights)
    apart = tree.map_leaves(
        lambda stacked, got: (stacked[honest].to(torch.float64).mean(0) - got).square().sum(),
        models["params"],
        merged["params"],
    )
    return float(sum(tree.leaves(apart)))
