"""Conversion between models and updates (the reply's parameters minus those the client received).

Channels act on updates; everything else in a reply (buffers, losses, control variates) is unchanged. In a `Chain` the
first channel takes the difference and the later ones receive an update: the chain gives them zero parameters, or none
({}) once the update is packed and no longer has the parameters' shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from consilience.core import rng, tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.settings import Invalid
from consilience.core.tree import Tree


def opened(reply: Tree, message: Tree, who: object) -> Tree:
    """One client's update by parameter name, or as packed by an earlier channel."""
    if "params" not in reply.get("model", {}) or "model" not in message:
        raise Invalid(
            f"channel {type(who).__name__} acts on the model that a client sends, but this algorithm's clients send "
            f"{', '.join(reply)}: use channel = 'plain'"
        )
    params, anchor = reply["model"]["params"], message["model"]["params"]
    return tree.map_leaves(torch.sub, params, anchor) if anchor else params


def carrying(reply: Tree, payload: Tree) -> Tree:
    """The reply with its parameters replaced."""
    return {**reply, "model": {**reply["model"], "params": payload}}


def anchors(received: Broadcast) -> Tree:
    """The parameters that clients received: the same for all, or stacked [m, ...]; {} inside a chain that packs."""
    return {**received.shared, **received.personal}["model"]["params"]


def is_personal(received: Broadcast) -> bool:
    """Whether every client received a different model."""
    return "model" in received.personal


def closed(cohort: Cohort, received: Broadcast, update: Tree) -> Cohort:
    """The cohort with models, as received parameters plus updates; the update of a missing reply is zero."""
    anchor, stacked = anchors(received), is_personal(received)
    if not anchor:
        return replace(cohort, reply=carrying(cohort.reply, update))
    heard = None if cohort.heard is None or cohort.heard.all() else torch.from_numpy(cohort.heard)

    def close(base: Tensor, move: Tensor) -> Tensor:
        shape = base.shape[1:] if stacked else base.shape
        move = by_row(move)[:, : shape.numel()].reshape(len(cohort), *shape).to(base.dtype)
        if heard is not None:
            # a replacement for a missing reply is the received model itself, without noise or residual
            silent = ~heard.to(move.device).reshape(-1, *(1,) * len(shape))
            move = move.masked_fill(silent, 0)
        return base + move

    params = {name: close(base, update[name]) for name, base in anchor.items() if name in update}
    return replace(cohort, reply=carrying(cohort.reply, params))


def floating(payload: Any) -> list[Tensor]:
    """The leaves that hold values rather than indices."""
    return [leaf for leaf in tree.leaves(payload) if leaf.is_floating_point()]


def each_floating(function: Any, payload: Tree) -> Tree:
    """`function(leaf, number)` for every floating leaf; index leaves are unchanged."""
    counter = iter(range(1 << 30))
    return tree.map_leaves(lambda leaf: function(leaf, next(counter)) if leaf.is_floating_point() else leaf, payload)


def leaf_key(key: Tensor, number: int) -> Tensor:
    """The key of one leaf's draws."""
    return rng.fold(key, number)


def norm(leaves: list[Tensor]) -> Tensor:
    """The Euclidean norm over all leaves, in float64."""
    return torch.stack([torch.linalg.vector_norm(leaf, dtype=torch.float64) for leaf in leaves]).norm()


def by_row(leaf: Tensor) -> Tensor:
    """[m, ...] -> [m, n]."""
    return leaf.reshape(len(leaf), leaf[0].numel())
