"""Sparsification: only some values of an update are sent; with error feedback the rest is added to the next one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.channel.update import anchors, carrying, closed, is_personal, opened
from consilience.core import rng
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.settings import Checked, Fraction
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class TopK(Checked):
    """Sends the `fraction` of values with the largest magnitude over all parameters, and their indices.

    With `feedback` (Seide et al. 2014; Stich et al. 2018) what is not sent is kept in memory and added to the
    client's next update; everything sent plus the memory then equals the sum of its updates.
    """

    fraction: Fraction = 0.01
    feedback: bool = True
    form = "sparse"  # values and places

    def init(self, start: Tree) -> Tree:
        """An empty residual."""
        return {"rest": _nothing(start)} if self.feedback else {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """The k largest values and their indices."""
        whole = _whole(opened(reply, message, self), message)
        whole = whole + memory["rest"] if self.feedback else whole
        places = whole.abs().topk(_count(self.fraction, len(whole))).indices
        sent = {"values": whole.gather(0, places), "places": places.to(torch.int32)}
        return carrying(reply, sent), {"rest": whole.scatter(0, places, 0)} if self.feedback else memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Models from sparse updates, with zeros elsewhere."""
        if not len(cohort):
            return cohort
        sent, size = cohort.reply["model"]["params"], sum(_sizes(received))
        places = sent["places"].to(torch.int64)
        # an index outside the model, which no honest client sends, makes the reply NaN, which screening refuses
        nowhere = (places < 0) | (places >= size)
        values = sent["values"].masked_fill(nowhere.any(1, keepdim=True), torch.nan)
        return _spread(cohort, received, values, places.masked_fill(nowhere, 0))


@dataclass(frozen=True, kw_only=True)
class RandomK(Checked):
    """Sends the `fraction` of values at random indices, and the seed from which the server computes the indices.

    With `feedback` the rest is kept in memory, as in `TopK`. Without it the values are multiplied by n/k, so that the
    update is unbiased.
    """

    fraction: Fraction = 0.01
    feedback: bool = True
    form = "sparse"  # values and a seed

    def init(self, start: Tree) -> Tree:
        """An empty residual."""
        return {"rest": _nothing(start)} if self.feedback else {}

    def encode(self, reply: Tree, message: Tree, memory: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """k values and the seed of their indices."""
        whole = _whole(opened(reply, message, self), message)
        whole = whole + memory["rest"] if self.feedback else whole
        count = _count(self.fraction, len(whole))
        places = _random_places(key, len(whole), count)
        values = whole.gather(0, places)
        if self.feedback:
            return carrying(reply, {"values": values, "seed": key}), {"rest": whole.scatter(0, places, 0)}
        return carrying(reply, {"values": values * (len(whole) / count), "seed": key}), memory

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        """Models from sparse updates, with zeros elsewhere."""
        if not len(cohort):
            return cohort
        sent, size = cohort.reply["model"]["params"], sum(_sizes(received))
        count = _count(self.fraction, size)
        places = torch.stack([_random_places(seed, size, count) for seed in sent["seed"]])  # one client at a time: [k]
        return _spread(cohort, received, sent["values"], places)


def _count(fraction: float, size: int) -> int:
    return max(1, int(fraction * size + 1e-9))


def _random_places(key: Tensor, size: int, count: int) -> Tensor:
    """[count] distinct random indices, uniform over sets: those of the `count` largest hashes."""
    return rng.bits(key, size).topk(count).indices


def _nothing(start: Tree) -> Tensor:
    return torch.zeros_like(_flat(start["params"]))


def _flat(params: Tree) -> Tensor:
    """[P] all parameters in one vector."""
    return torch.cat([leaf.flatten() for leaf in params.values()])


def _whole(update: Tree, message: Tree) -> Tensor:
    """[P] the update as one vector; personal parameters, which are not sent, are 0."""
    params = message["model"]["params"]
    return _flat({name: update.get(name, torch.zeros_like(value)) for name, value in params.items()})


def _sizes(received: Broadcast) -> list[int]:
    leaves = anchors(received).values()
    return [leaf[0].numel() if is_personal(received) else leaf.numel() for leaf in leaves]


def _spread(cohort: Cohort, received: Broadcast, values: Tensor, places: Tensor) -> Cohort:
    """Models from [m, k] values (possibly padded) at [m, k] indices."""
    sizes, names = _sizes(received), list(anchors(received))
    values = values[:, : places.shape[1]]
    whole = values.new_zeros(len(cohort), sum(sizes)).scatter(1, places, values)
    return closed(cohort, received, dict(zip(names, whole.split(sizes, 1))))
