"""The server's half of a round: decode, screen and aggregate replies; used by the loop and the Flower strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.arrivals import labelled
from consilience.core.capabilities import (
    IndependentReplies,
    MovesWithoutReplies,
    PostTrainingPass,
    TrainsModel,
    capability,
)
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.lengths import NormTest
from consilience.core.protocols import Engine, HasTask, waits_for_replies
from consilience.core.rng import key
from consilience.core.screening import (
    Limits,
    if_enough,
    limit_growth,
    model_test,
    reply_test,
    screen_replies,
    unusable,
)
from consilience.core.settings import Invalid
from consilience.core.tree import Tree


class Diverged(RuntimeError):
    """Too many rounds in a row had no usable reply; `result` has the finished rounds, if `cs.train` raised this."""

    result: Any = None


class Conclusion(NamedTuple):
    """The result of a round's replies; if there is a problem, the state is unchanged."""

    state: Tree
    cohort: Cohort  # the replies that were used
    sound: np.ndarray  # ids of the replies that passed every check, even if too few did for the round to count
    notes: Notes
    up: int  # bytes of the post-training pass
    length: float | None = None  # the median update, before any was clipped, where `Limits.max_growth` is set
    problem: Diverged | Invalid | None = None  # why the server cannot continue from this round
    updated: bool = False  # whether the server rule was called; not without a usable reply, unless it needs none
    losses: np.ndarray | None = None  # [m] what the replies' losses are, if they are known on the host


def conclude(
    algorithm: Algorithm,
    state: Tree,
    sent: Cohort,
    received: Broadcast,
    *,
    round: int,
    seed: int,
    limits: Limits | None = None,
    engine: Engine | None = None,
    staleness: np.ndarray | None = None,
    late: int = 0,
    secret: bytes | None = None,
    lengths: Sequence[float] = (),
    meanwhile: Callable[[], None] | None = None,
) -> Conclusion:
    """Decode and screen replies, run the post-training pass, update the server, and reject an unusable model.

    received: what the clients of `sent` received, in their order. staleness: [m] how many rounds ago that was.
    lengths: the median lengths of updates in the rounds before, for `limits.max_growth`.
    engine: needed for a post-training pass and for server rules that train. secret: the round's key, where the server
    rule draws from one. meanwhile: called once, where the host would wait for the device.
    """
    server = algorithm.server
    decoded = algorithm.channel.decode(sent, received, key(seed, "decode", round))
    cohort = labelled(replace(decoded, seed=seed), sent.ids, received, staleness, late)
    independent = capability(server, IndependentReplies)
    if independent is not None and independent.independent_replies:
        limits = replace(
            limits or Limits(), max_ratio=None, max_growth=None
        )  # with the median, one client could affect whether another's reply is accepted
    queued = _queued(algorithm, state, cohort, received, limits, secret) if _on_gpu(cohort) else None
    if meanwhile is not None:
        meanwhile()
    early = None if queued is None else _concluded(queued, cohort)
    if early is not None:
        return early
    cohort, length = screen_replies(cohort, received.among(sent.ids, cohort.ids), limits), None
    if limits is not None and limits.max_growth is not None:
        cohort, length = limit_growth(cohort, received.among(sent.ids, cohort.ids), limits.max_growth, lengths)
    after_training, up = capability(algorithm.client, PostTrainingPass), 0
    if after_training is not None and engine is not None and len(cohort):
        cohort, up = _with_post_training(after_training, engine, cohort, received.among(sent.ids, cohort.ids), seed)
    sound, cohort = cohort.ids, if_enough(cohort, limits)
    nothing = Conclusion(state, cohort, sound, {}, up, length if len(cohort) else None)
    if not len(cohort):
        moving = capability(server, MovesWithoutReplies)
        if moving is None or not moving.moves_without_replies:
            return nothing  # a round without a usable reply changes nothing
    try:
        given = cohort if secret is None else replace(cohort, secret=secret)  # for the rule alone
        after, notes = server.update(state, given)
        training = capability(server, TrainsModel)
        if len(cohort) and training is not None:
            if not isinstance(engine, HasTask):
                raise Invalid(f"{type(server).__name__} trains a model itself, but {type(engine).__name__} runs none")
            after = training.train(engine.task, after, cohort)
        after = tree.here(after)  # fetch replies in other processes that the rule kept
        _refuse_unusable(round, notes.get("weights"), server.model(after))
    except (Diverged, Invalid) as problem:
        return nothing._replace(problem=problem)
    return nothing._replace(state=after, notes=notes, updated=True)


def _on_gpu(cohort: Cohort) -> bool:
    """Whether the host runs ahead of the device, which still computes the replies."""
    return any(leaf.is_cuda for leaf in tree.leaves(cohort.reply))


class QueuedUpdate(NamedTuple):
    """An update and its tests, which the device has yet to compute."""

    state: Tree
    notes: Notes
    replies: NormTest
    model: NormTest


def _queued(
    algorithm: Algorithm,
    state: Tree,
    cohort: Cohort,
    received: Broadcast,
    limits: Limits | None,
    secret: bytes | None,
) -> QueuedUpdate | None:
    """The update and all tests of a round without a wait for the device; None if the round needs another step.

    The server rule is called before its replies are tested; rules are pure, so nothing is lost if a test fails. Only
    for rules that sum replies or read them on the device.
    """
    server = algorithm.server
    passes = (capability(server, TrainsModel), capability(algorithm.client, PostTrainingPass), secret)
    few = limits is not None and (limits.max_growth is not None or len(cohort) < limits.min_valid)
    if waits_for_replies(server) or few or any(step is not None for step in passes):
        return None
    replies = reply_test(cohort, received, limits)
    if replies is None:
        return None
    try:
        after, notes = server.update(state, cohort)
    except (Diverged, Invalid):
        return None  # perhaps because of a reply that is not usable
    model = model_test(server.model(after))
    if model is None:
        return None
    return QueuedUpdate(after, notes, replies, model)


def _concluded(queued: QueuedUpdate, cohort: Cohort) -> Conclusion | None:
    """The conclusion of a round in which every test passes, after one wait for the device; None if a test fails."""
    asked = {"weights": queued.notes.get("weights"), "losses": cohort.reply.get("loss")}
    found = _fetched({"replies": queued.replies.values, "model": queued.model.values, **asked})
    tested = queued.replies.passes(found["replies"]) and queued.model.passes(found["model"])
    if not tested or not _usable_weights(found.get("weights")):
        return None
    losses = found.get("losses")
    return Conclusion(queued.state, cohort, cohort.ids, queued.notes, 0, updated=True, losses=losses)


def _fetched(values: dict[str, Tensor | None]) -> dict[str, np.ndarray]:
    """The tensors that there are as float64 vectors, copied from the device at once."""
    parts = {name: value.reshape(-1) for name, value in values.items() if value is not None}
    device = next(iter(parts.values())).device
    together = torch.cat([part.to(device, torch.float64) for part in parts.values()]).numpy(force=True)
    ends = np.cumsum([len(part) for part in parts.values()])
    return dict(zip(parts, np.split(together, ends[:-1])))


def _usable_weights(weights: np.ndarray | None) -> bool:
    return weights is None or bool(np.isfinite(weights).all() and (weights != 0).any())


def _with_post_training(
    after_training: PostTrainingPass, engine: Engine, cohort: Cohort, received: Broadcast, seed: int
) -> tuple[Cohort, int]:
    """(the cohort with the results of the post-training pass, their bytes); clients already have their models."""
    shared, personal = {"received": received.shared}, {"model": cohort.reply["model"]}
    if received.personal:  # part of the broadcast was personal
        common = tree.map_leaves(lambda leaf: leaf.expand(len(cohort), *leaf.shape), received.shared)
        shared, personal = {}, {**personal, "received": {**common, **received.personal}}
    own = Broadcast(shared=shared, personal=personal)
    answer = engine.exchange(after_training.post_training, Plain(), own, cohort.ids, round=cohort.round, seed=seed)
    seen = screen_replies(answer)
    if len(seen) < len(cohort):  # clients without a reply to this pass are left out
        cohort = cohort.only(np.isin(cohort.ids, seen.ids), **seen.counts).refusing(seen.refusals)
    return replace(cohort, reply={**cohort.reply, **seen.reply}), answer.nbytes()


def _refuse_unusable(round: int, weights: Tensor | None, model: Tree) -> None:
    """Raise, before the state is replaced, for weights or a model that the next round could not use."""
    given = None if weights is None else weights.detach().cpu().numpy()
    if given is not None and not _usable_weights(given):
        found = ", ".join(f"{weight:g}" for weight in given.tolist()[:8])
        raise Diverged(f"round {round + 1}: the aggregation weights are {found} ..., all zero or not finite")
    what = unusable(model)
    if what:
        raise Diverged(
            f"round {round + 1}: the new global model {what}, though every reply could be used: lower the learning "
            f"rate. Nothing of this round is kept; "
            + (f"round {round} is the last good one" if round else "there is no good round before it")
        )
