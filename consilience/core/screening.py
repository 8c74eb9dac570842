"""Checks of the replies' values before the server rule reads them, used with every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from consilience.core import tree
from consilience.core.clipping import clipped, growth_clipped
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.lengths import NormTest, by_scale, exact_lengths, quick_lengths, sources, together
from consilience.core.refusal import Refusal, tally
from consilience.core.remote import RemoteTensor
from consilience.core.settings import Count, Invalid, Positive, Whole, check
from consilience.core.tree import Tree

MODEL, PARAMS = "model/", "model/params"
POWER = {PARAMS: 1}  # of `Limits.max_ratio`; 2 for buffers: a variance is a square
VARIANCE = "running_var"  # PyTorch's name of it in every normalising layer
REMEMBERED = 20  # rounds whose median update length counts for `Limits.max_growth`
ROOM = 4  # factor between the longest usable tree and one whose squares overflow: leaves room for differences and sums


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on replies, and the number of valid replies that a round needs."""

    min_valid: Count = 1  # replies; with fewer the round changes nothing
    max_norm: Positive | None = (
        None  # norm of an update's parameters, and of its floating buffers: longer ones are clipped
    )
    max_ratio: Positive | None = 1000.0  # of an update's norm to the round's median and to the model's; None: no limit
    max_growth: Positive | None = (
        None  # ratio of a norm to the running median of updates, or to the round's median: longer parts are clipped
    )
    examples_ratio: Positive | None = None  # of a client's counted rows to the median of all clients; deployments only
    max_examples: Count = 10_000_000  # rows that a client may report
    on_excess: Literal["refuse", "cap"] = "refuse"  # what happens to replies that report more
    max_steps: Count = 10_000_000  # local steps that a client may report
    castable: tuple[str, ...] = ()  # floating types that are cast to the expected one instead of refused
    slack: Whole = 4096  # bytes by which a reply may exceed the expected size
    needs_digest: bool = False  # whether a reply without one is refused
    max_metrics: Whole = 64  # metrics reported with a reply

    def __post_init__(self) -> None:
        check(self)
        for name in self.castable:
            if name not in ("float16", "bfloat16", "float32", "float64"):
                raise Invalid(f"Limits.castable = {name!r} is not one of float16, bfloat16, float32, float64")


_USUAL = Limits()
_SENT = "sent"  # prefix of the path of a tensor of the broadcast


def screen_replies(cohort: Cohort, received: Broadcast | None = None, limits: Limits | None = None) -> Cohort:
    """The usable replies, with long updates clipped; the others are dropped.

    Refused are NaN and infinite values (`nonfinite`), finite values whose squares overflow, and updates beyond
    `limits.max_ratio` (both `too_large`). `received` is what the cohort's clients were sent: updates are measured from
    there. With `limits.max_norm`, long updates are clipped instead. With `limits.max_growth`, negative variances are
    refused, too (`implausible`); long updates are then clipped by `limit_growth`.
    """
    if not len(cohort):
        return cohort
    limits = limits or _USUAL
    test = reply_test(cohort, received, limits)
    if test is None or not test.passes():
        cohort = _examined(cohort, received, limits)
    if limits.max_growth is not None:
        cohort, _ = _without(cohort, {}, _negative_variances(cohort))
    return cohort


def reply_test(cohort: Cohort, received: Broadcast | None, limits: Limits | None) -> NormTest | None:
    """A test that only usable replies pass: the norms of all together, which bound that of each, meet every limit.

    On a GPU this takes a few operations for any number of clients and tensors. None if norms cannot tell.
    """
    limits = limits or _USUAL
    groups, shared = by_scale(cohort.reply), {} if received is None else received.shared
    every = [leaf for leaves in groups.values() for leaf in leaves.values()]
    if not every or limits.max_norm is not None or any(isinstance(leaf, RemoteTensor) for leaf in every):
        return None
    models = by_scale({"model": shared["model"]}) if "model" in shared else {}
    starts = {name: models.get(name, {}) for name in groups if name.startswith(MODEL) and limits.max_ratio is not None}
    if any(not groups[name].keys() <= start.keys() for name, start in starts.items()):
        return None
    anchors = [[start[path] for path in groups[name]] for name, start in starts.items()]
    ratio, longest = limits.max_ratio or 0.0, _longest(torch.float32)

    def accepts(found: np.ndarray) -> bool:
        lengths, sent = dict(zip(groups, found)), dict(zip(starts, found[len(groups) :]))
        # |w - s| <= |w| + |s|; 0.9 for rounding
        close = all(lengths[name] <= 0.9 * (ratio ** POWER.get(name, 2) - 1) * start for name, start in sent.items())
        return close and all(length <= longest for length in lengths.values())

    return NormTest([*(sources(list(leaves.values())) for leaves in groups.values()), *anchors], accepts)


def model_test(model: Tree) -> NormTest | None:
    """A test that only a model passes from which clients can train; None for a model without floating values."""
    floating = [leaf for leaf in tree.leaves(model) if leaf.is_floating_point() and leaf.numel()]
    if not floating:
        return None
    most = np.array([_longest(leaf.dtype) for leaf in floating])
    return NormTest([[leaf] for leaf in floating], lambda found: bool((found <= most).all()))


def _examined(cohort: Cohort, received: Broadcast | None, limits: Limits) -> Cohort:
    """The usable replies, each of them tested: a quick test of all values, exact ones where that is not enough."""
    everyone, clips = cohort.ids, limits.max_norm is not None
    rough, models = _rough(cohort.reply, received)
    if not all(np.isfinite(length).all() for length in rough.values()):
        finite = tree.all_finite(cohort.reply)
        if not finite.all():
            cohort, rough = _without(cohort, rough, _nonfinite(cohort, ~finite))
    for name in [name for name in rough if not (clips and name.startswith(MODEL))]:
        if not (rough[name] <= _longest(torch.float32)).all():
            cohort, rough = _without(cohort, rough, _overflowing(cohort, name))
    start = received and received.among(everyone, cohort.ids)
    if limits.max_norm is not None:
        return clipped(cohort, start, limits.max_norm) if len(cohort) else cohort
    if limits.max_ratio is not None:
        models = models if len(cohort) == len(everyone) else _rough({}, start)[1]
        cohort, _ = _without(cohort, rough, _out_of_proportion(cohort, start, limits.max_ratio, rough, models))
    return cohort


def limit_growth(
    cohort: Cohort, received: Broadcast | None, factor: float, lengths: Sequence[float] = ()
) -> tuple[Cohort, float | None]:
    """(the cohort with all that is long in a reply clipped, its `median_length` before that), for `Limits.max_growth`.

    Long is an update of more than `factor` times the `running_median` of the rounds before, or, in the first, this
    round's median, and anything else of more than `factor` times its median in this round.
    """
    length = median_length(cohort, received)
    return (growth_clipped(cohort, received, factor, running_median(lengths)) if len(cohort) else cohort), length


def median_length(cohort: Cohort, received: Broadcast | None) -> float | None:
    """The (lower) median norm of a cohort's updates; None if replies hold no model."""
    sent = {} if received is None else {**received.shared, **received.personal}
    model, anchor = cohort.reply.get("model"), sent.get("model")
    if not len(cohort) or not isinstance(model, dict) or not isinstance(anchor, dict):
        return None
    params, starts = model.get("params"), anchor.get("params", {})
    if not isinstance(params, dict) or not set(params) <= set(starts):
        return None
    moved = {name: leaf for name, leaf in params.items() if leaf.is_floating_point() and leaf.numel()}
    if not moved:
        return None
    lengths = np.sort(exact_lengths(list(moved.values()), [starts[name] for name in moved]))
    return float(lengths[(len(lengths) - 1) // 2])


def running_median(lengths: Sequence[float]) -> float | None:
    """The median of `median_length` over the last rounds; None before the first."""
    recent = sorted(lengths[-REMEMBERED:])
    return recent[(len(recent) - 1) // 2] if recent else None


def unusable(model: Tree) -> str:
    """Why clients could not train from this model; "" if they can."""
    test = model_test(model)
    if test is None or test.passes():
        return ""
    flat = {path: leaf for path, leaf in tree.flatten(model).items() if leaf.is_floating_point() and leaf.numel()}
    for path, leaf in flat.items():
        if not bool(leaf.isfinite().all()):
            return f"holds NaN or infinite values in {path}"
    path = max(zip(flat, test.lengths), key=lambda pair: pair[1] / _longest(flat[pair[0]].dtype))[0]
    return f"is too large in {path}: its squares overflow {str(flat[path].dtype).removeprefix('torch.')}"


def if_enough(cohort: Cohort, limits: Limits | None) -> Cohort:
    """The cohort, or an empty one if fewer replies are left than a round needs."""
    if limits is None or not 0 < len(cohort) < limits.min_valid:
        return cohort
    return cohort.only(np.zeros(len(cohort), dtype=bool), too_few=len(cohort))


def _rough(reply: Tree, received: Broadcast | None) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(group -> [m] norms of the replies, path -> [1] or [m] norms of the broadcast model), fetched in one transfer.

    A norm is not finite if a value or its square is not.
    """
    groups, own = by_scale(reply), received is not None and "model" in received.personal
    sent = {} if received is None else received.personal if own else received.shared
    starts = {
        path: leaf if own else leaf.unsqueeze(0)
        for leaves in by_scale({name: part for name, part in sent.items() if name == "model"}).values()
        for path, leaf in leaves.items()
    }
    replies = {path: leaf for leaves in groups.values() for path, leaf in leaves.items()}
    lengths = quick_lengths({**replies, **{f"{_SENT}{path}": leaf for path, leaf in starts.items()}})
    rough = {name: together([lengths[path] for path in leaves]) for name, leaves in groups.items()}
    return rough, {path: lengths[f"{_SENT}{path}"] for path in starts}


def _without(
    cohort: Cohort, rough: dict[str, np.ndarray], refusals: list[Refusal]
) -> tuple[Cohort, dict[str, np.ndarray]]:
    """The cohort and its norms without the refused replies, which are counted and listed."""
    if not refusals:
        return cohort, rough
    kept = ~np.isin(cohort.ids, [refusal.client for refusal in refusals])
    cohort = cohort.only(kept, **tally(refusals)).refusing(refusals)
    return cohort, {name: length[kept] for name, length in rough.items()}


def _overflowing(cohort: Cohort, name: str) -> list[Refusal]:
    """Clients whose values are finite but whose squares overflow in their own type."""
    leaves = list(by_scale(cohort.reply)[name].values())
    most = min(_longest(leaf.dtype) for leaf in leaves)
    lengths = exact_lengths(leaves)
    return [
        Refusal(
            client=int(cohort.ids[row]),
            reason="too_large",
            key=name,
            detail=f"its length is {lengths[row]:.3g}, and the squares of more than {most:.3g} overflow",
        )
        for row in np.flatnonzero(lengths > most)
    ]


def _out_of_proportion(
    cohort: Cohort,
    received: Broadcast | None,
    ratio: float,
    rough: dict[str, np.ndarray],
    models: dict[str, np.ndarray],
) -> list[Refusal]:
    """Clients whose update is longer than `ratio` times both the model they were sent and the round's median update.

    Where clients were sent no such model (IFCA sends several), whole models are compared with their median.
    """
    refusals: dict[int, Refusal] = {}
    starts = {} if received is None else tree.flatten({**received.shared, **received.personal})
    for name, leaves in by_scale({"model": cohort.reply.get("model", {})}).items():
        if not len(cohort) or not name.startswith(MODEL):
            continue
        times, model, lengths, anchored = ratio ** POWER.get(name, 2), np.zeros(1), rough[name], False
        if all(path in models for path in leaves):
            model = together([models[path] for path in leaves])  # [1], or [m] where each was sent its own
            # |w - s| <= |w| + |s|; 0.9 for rounding
            if (rough[name] <= 0.9 * (times - 1) * model).all():
                continue
            lengths, anchored = exact_lengths(list(leaves.values()), [starts[path] for path in leaves]), True
        moved = np.sort(lengths[lengths > 0])
        median = moved[(len(moved) - 1) // 2] if len(moved) else 0.0
        for row in np.flatnonzero(lengths > times * np.maximum(median, model)):
            base = f", and the model it was sent, {np.broadcast_to(model, lengths.shape)[row]:.3g}" if anchored else ""
            detail = (
                f"{'an update' if anchored else 'a model'} of length {lengths[row]:.3g}, more than {times:g} times "
                f"the round's median, {median:.3g}{base} (limits.max_ratio)"
            )
            client = int(cohort.ids[row])
            refusals.setdefault(client, Refusal(client=client, reason="too_large", key=name, detail=detail))
    return list(refusals.values())


def _negative_variances(cohort: Cohort) -> list[Refusal]:
    """Clients that send a negative running variance, whose root would be NaN at everyone who gets the mean."""
    bad: dict[int, Refusal] = {}
    for path, leaf in tree.flatten(cohort.reply).items():
        if path.endswith(VARIANCE) and leaf.is_floating_point():
            for row in np.flatnonzero((leaf < 0).reshape(len(leaf), -1).any(1).cpu().numpy()):
                client = int(cohort.ids[row])
                refusal = Refusal(client=client, reason="implausible", key=path, detail="a negative variance")
                bad.setdefault(client, refusal)
    return list(bad.values())


def _longest(kind: torch.dtype) -> float:
    """The largest norm of a tensor of this type whose square is finite; narrow types are squared in float32."""
    return torch.finfo(torch.float32 if kind.itemsize < 4 else kind).max ** 0.5 / ROOM


def _nonfinite(cohort: Cohort, bad: np.ndarray) -> list[Refusal]:
    """Refusals that name the first non-finite tensor of each bad reply."""
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
