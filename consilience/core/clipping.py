"""Clipping of updates to a maximum norm, or to a multiple of what other clients send."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.lengths import by_scale, exact_lengths
from consilience.core.settings import Invalid
from consilience.core.tree import Tree

REPORTED = "loss"  # of training: recorded as it is reported


def clipped(
    cohort: Cohort, received: Broadcast | None, bound: float, kinds: tuple[str, ...] = ("params", "buffers")
) -> Cohort:
    """Updates clipped to norm `bound`; parameters and floating buffers are clipped separately."""
    sent = {} if received is None else {**received.shared, **received.personal}
    model, anchor = cohort.reply.get("model"), sent.get("model")
    if not isinstance(model, dict) or not isinstance(anchor, dict) or "params" not in model:
        raise Invalid(
            f"limits.max_norm = {bound:g} bounds the update of a model, but this algorithm's clients send "
            f"{', '.join(cohort.reply)}: leave it out"
        )
    after, long = dict(model), np.zeros(len(cohort), dtype=bool)
    for kind, leaves in ((kind, model[kind]) for kind in kinds if kind in model):
        moves = {name: leaf for name, leaf in leaves.items() if leaf.is_floating_point() and leaf.numel()}
        short, rows = _shortened(moves, anchor[kind], bound)
        after[kind] = {**leaves, **short}
        long[rows] = True
    return _counted(cohort, {**cohort.reply, "model": after}, long) if long.any() else cohort


def growth_clipped(cohort: Cohort, received: Broadcast | None, times: float, usual: float | None) -> Cohort:
    """Every floating part of a reply (parameters, buffers, each other entry) clipped to `times` its median norm in
    the round; an update's parameters to `times` `usual`, if that is known, buffers to `times` squared.

    What `received` holds is subtracted first. The square: a variance is one, and honest clients with few rows have
    far larger ones. The training loss is not clipped: no model depends on its size.
    """
    sent = {} if received is None else tree.flatten({**received.shared, **received.personal})
    flat, long = tree.flatten(cohort.reply), np.zeros(len(cohort), dtype=bool)
    for name, leaves in by_scale({key: part for key, part in cohort.reply.items() if key != REPORTED}).items():
        anchored = name.startswith("model/") and all(path in sent for path in leaves)
        start = {path: sent[path] if anchored else torch.zeros_like(leaf[0]) for path, leaf in leaves.items()}
        length = usual if anchored and name == "model/params" else None
        middle = length or _median(exact_lengths(list(leaves.values()), list(start.values())))
        bound = (times**2 if name == "model/buffers" else times) * middle
        if bound > 0:
            short, rows = _shortened(leaves, start, bound)
            flat |= short
            long[rows] = True
    return _counted(cohort, tree.shaped_like(cohort.reply, flat), long) if long.any() else cohort


def _median(lengths: np.ndarray) -> float:
    """The lower median of the lengths that are not zero."""
    moved = np.sort(lengths[lengths > 0])
    return float(moved[(len(moved) - 1) // 2]) if len(moved) else 0.0


def _counted(cohort: Cohort, reply: Tree, long: np.ndarray) -> Cohort:
    """The cohort with these replies, and the number of those that were clipped."""
    return replace(cohort, reply=reply, counts={**cohort.counts, "clipped_updates": int(long.sum())})


def _shortened(moves: Tree, anchor: Tree, bound: float) -> tuple[Tree, np.ndarray]:
    """(leaves with long updates clipped, which rows were clipped); other rows are unchanged bit for bit.

    A quick test finds the rows that may be too long; only these are measured exactly.
    """
    if not moves:
        return {}, np.empty(0, dtype=np.int64)
    lengths = [
        torch.linalg.vector_norm((leaf - anchor[name]).reshape(len(leaf), -1), dim=1).double()
        for name, leaf in moves.items()
    ]
    # 0.99: rounding; a length that overflowed is not below the bound either
    suspect = np.flatnonzero(~(torch.stack(lengths).norm(dim=0) < 0.99 * bound).cpu().numpy())
    if not len(suspect):
        return {}, suspect
    index = torch.from_numpy(suspect).to(lengths[0].device)
    sent = {name: leaf[index] for name, leaf in moves.items()}
    base = {
        name: anchor[name][index] if anchor[name].dim() == leaf.dim() else anchor[name] for name, leaf in sent.items()
    }
    share = _share(sent, base, bound)  # [n]
    long = share < 1
    after = {
        name: leaf.index_copy(0, index[long], _towards(base[name], sent[name], share)[long])
        for name, leaf in moves.items()
    }
    return after, suspect[long.cpu().numpy()]


def _share(sent: Tree, base: Tree, bound: float) -> Tensor:
    """[n] the factor min(1, bound / norm) of each update, computed without overflow."""
    # half of each, in float64: the difference of two finite numbers can be infinite, that of their halves cannot
    halves = [(leaf.double() / 2 - base[name].double() / 2).reshape(len(leaf), -1) for name, leaf in sent.items()]
    scale = torch.stack([half.abs().amax(1) for half in halves]).amax(0).clamp(min=1e-300)  # [n]
    parts = [torch.linalg.vector_norm(half / scale.unsqueeze(1), dim=1) for half in halves]
    length = torch.stack(parts).norm(dim=0)  # of the half, in units of its largest entry: between 1 and sqrt(P)
    return (bound / 2 / scale / length.clamp(min=1)).clamp(max=1)


def _towards(base: Tensor, leaf: Tensor, share: Tensor) -> Tensor:
    """base + share (leaf - base), row by row."""
    by_row = share.reshape(-1, *(1,) * (leaf.dim() - 1))
    return (by_row * leaf.double() + (1 - by_row) * base.double()).to(leaf.dtype)
