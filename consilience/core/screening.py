"""The last look at replies before the server rule sees them, whatever engine they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.refusal import Refusal
from consilience.core.settings import Count, Invalid, Positive, Whole, check
from consilience.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a reply may be at most, and how many are needed for a round to count."""

    min_valid: Count = 1  # replies; with fewer the round changes nothing
    max_norm: Positive | None = (
        None  # of an update (its parameters; its floating buffers alike): longer ones are clipped
    )
    max_examples: Count = 10_000_000  # rows that a client may say it has
    on_excess: Literal["refuse", "cap"] = "refuse"  # what happens to replies that claim more
    max_steps: Count = 10_000_000  # local steps that a client may say it did
    castable: tuple[str, ...] = ()  # floating types that are cast to the expected one instead of refused
    slack: Whole = 4096  # bytes that a reply may be longer than expected
    needs_digest: bool = False  # whether a reply without one is refused
    max_metrics: Whole = 64  # numbers reported beside a reply

    def __post_init__(self) -> None:
        check(self)
        for name in self.castable:
            if name not in ("float16", "bfloat16", "float32", "float64"):
                raise Invalid(f"Limits.castable = {name!r} is not one of float16, bfloat16, float32, float64")


def screen(cohort: Cohort, received: Broadcast | None = None, limits: Limits | None = None) -> Cohort:
    """The replies without NaN or infinite values, and no update longer than allowed: the others never touch the model.

    `received` is what the cohort's clients were sent: updates are measured from there.
    """
    if not len(cohort):
        return cohort
    finite = tree.all_finite(cohort.reply).cpu().numpy()
    if not finite.all():
        found, everyone = _nonfinite(cohort, ~finite), cohort.ids
        cohort = cohort.only(finite, nonfinite=len(found)).refusing(found)
        received = received and received.among(everyone, cohort.ids)
    if len(cohort) and limits is not None and limits.max_norm is not None:
        return _bounded(cohort, received, limits.max_norm)
    return cohort


def if_enough(cohort: Cohort, limits: Limits | None) -> Cohort:
    """The cohort, or nobody where fewer replies are left than a round needs."""
    if limits is None or not 0 < len(cohort) < limits.min_valid:
        return cohort
    return cohort.only(np.zeros(len(cohort), dtype=bool), too_few=len(cohort))


def _nonfinite(cohort: Cohort, bad: np.ndarray) -> list[Refusal]:
    """Who sent what: the first tensor of each bad reply that is not finite."""
    rows = np.flatnonzero(bad)
    index = torch.from_numpy(rows)
    flat = {path: leaf for path, leaf in tree.flatten(cohort.reply).items() if leaf.is_floating_point()}
    spoilt = [leaf[index.to(leaf.device)].reshape(len(rows), -1).isfinite().all(1) for leaf in flat.values()]
    first = torch.stack(spoilt).to(torch.int8).argmin(0).tolist()  # of [L, n]
    paths, detail = list(flat), "NaN or infinite values"
    return [
        Refusal(client=int(cohort.ids[row]), reason="nonfinite", key=paths[number], detail=detail)
        for row, number in zip(rows, first)
    ]


def _bounded(cohort: Cohort, received: Broadcast | None, bound: float) -> Cohort:
    """Updates longer than `bound` shortened to it: parameters together, and floating buffers together."""
    sent = {} if received is None else {**received.shared, **received.personal}
    model, anchor = cohort.reply.get("model"), sent.get("model")
    if not isinstance(model, dict) or not isinstance(anchor, dict) or "params" not in model:
        raise Invalid(
            f"limits.max_norm = {bound:g} bounds the way of a model, but this algorithm's clients send "
            f"{', '.join(cohort.reply)}: leave it out"
        )
    after, long = dict(model), np.zeros(len(cohort), dtype=bool)
    for kind, leaves in model.items():
        moves = {name: leaf for name, leaf in leaves.items() if leaf.is_floating_point() and leaf.numel()}
        short, rows = _shortened(moves, anchor[kind], bound)
        after[kind] = {**leaves, **short}
        long[rows] = True
    if not long.any():
        return cohort
    counts = {**cohort.counts, "clipped_updates": int(long.sum())}
    return replace(cohort, reply={**cohort.reply, "model": after}, counts=counts)


def _shortened(moves: Tree, anchor: Tree, bound: float) -> tuple[Tree, np.ndarray]:
    """The leaves with updates shortened where they are too long, and which rows those are; the others keep their bits.

    A quick look finds the rows that may be too long; only these are measured with care.
    """
    if not moves:
        return {}, np.empty(0, dtype=np.int64)
    lengths = [
        torch.linalg.vector_norm((leaf - anchor[name]).flatten(1), dim=1).double() for name, leaf in moves.items()
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
    """[n] what may be kept of each update: bound / norm where that is below 1, without overflow on the way."""
    # half of each, in float64: the difference of two finite numbers can be infinite, that of their halves cannot
    halves = [(leaf.double() / 2 - base[name].double() / 2).flatten(1) for name, leaf in sent.items()]
    scale = torch.stack([half.abs().amax(1) for half in halves]).amax(0).clamp(min=1e-300)  # [n]
    parts = [torch.linalg.vector_norm(half / scale.unsqueeze(1), dim=1) for half in halves]
    length = torch.stack(parts).norm(dim=0)  # of the half, in units of its largest entry: between 1 and sqrt(P)
    return (bound / 2 / scale / length.clamp(min=1)).clamp(max=1)


def _towards(base: Tensor, leaf: Tensor, share: Tensor) -> Tensor:
    """base + share (leaf - base), row by row."""
    by_row = share.reshape(-1, *(1,) * (leaf.dim() - 1))
    return (by_row * leaf.double() + (1 - by_row) * base.double()).to(leaf.dtype)
