"""The training loop: the only one in the library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.arrivals import QueryCost, gather, labelled, pace_of
from consilience.core.capabilities import (
    ChecksSurroundings,
    DrawsSecretly,
    IndependentReplies,
    MovesWithoutReplies,
    PostTrainingPass,
    PreTrainingPass,
    ReceivesSizes,
    RoundKeys,
    TrainsModel,
    capability,
)
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.protocols import Engine, HasTask, ServerRule
from consilience.core.rng import key
from consilience.core.screening import (
    REMEMBERED,
    Limits,
    if_enough,
    median_length,
    running_median,
    screen,
    unusable,
)
from consilience.core.settings import Invalid
from consilience.core.tree import Tree


class Diverged(RuntimeError):
    """Too many rounds in a row had no usable reply."""


class TooFewClients(RuntimeError):
    """Too few clients are connected, or none answers; the last finished round is saved and can be resumed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """All that the next round depends on: a run resumed from it gives the same results as an uninterrupted one."""

    round: int  # rounds finished
    server: Tree
    memory: Tree
    losses: np.ndarray  # [K] last loss each client reported
    bad_rounds: int = 0
    lengths: tuple[float, ...] = ()  # median update of the last rounds, where `Limits.max_growth` needs them
    pending: Tree = field(default_factory=dict)  # the simulated time, and who is at work with what


@dataclass(frozen=True, eq=False, kw_only=True)
class Round:
    """One finished round."""

    number: int  # counts from 1
    model: Tree
    cohort: Cohort
    chosen: np.ndarray
    notes: Notes
    bytes_down: int
    bytes_up: int
    clock: float  # simulated seconds since the run began
    snapshot: Snapshot


def run(
    algorithm: Algorithm,
    engine: Engine,
    *,
    rounds: int,
    seed: int = 0,
    start: Tree | None = None,
    resume: Snapshot | None = None,
    max_bad_rounds: int = 3,
    limits: Limits | None = None,
    keys: RoundKeys | None = None,
) -> Iterator[Round]:
    """Train, yielding each finished round; whatever observes (reports, checkpoints, early stopping) consumes this.

    A round ends when enough replies are in: all that were asked for, or, where the server rule has a buffer, as many
    as that holds, while the other clients keep working from the model they were sent. Replies that break the `limits`
    are refused, and named in the cohort; with fewer than `limits.min_valid` left the round changes nothing.

    rounds: the last round's number; with `resume`, those done before count.
    seed: decides the selection, the batches and all other draws (0).
    start: a model in place of the engine's; resume: the `snapshot` of a round, from which the rest is exactly the same.
    max_bad_rounds: so many rounds in a row without a usable reply raise `Diverged` (3).
    keys: where the secret of each round comes from, if the server rule draws secret noise (`DrawsSecretly`); by
    default from the operating system. To repeat a round of such a rule, give it the same key.
    """
    careful = capability(algorithm.server, ChecksSurroundings)
    if careful is not None:
        careful.check_surroundings(algorithm, engine, limits)
    here = resume or _first(algorithm, engine, start)
    engine.restore(here.memory)
    server, pace = algorithm.server, pace_of(algorithm, engine)
    secretive = capability(server, DrawsSecretly)
    for number in range(here.round, rounds):
        secret = None if secretive is None else secretive.round_key(number + 1, keys)
        done = gather(algorithm, engine, here, pace, seed, secret)
        ids, received = done.arrived.ids, done.pending.received(done.arrived)
        seen = _look(algorithm, engine, received, ids, number, seed)
        sent = engine.exchange(algorithm.client, algorithm.channel, seen, ids, round=number, seed=seed)
        ended = conclude(
            algorithm,
            here.server,
            sent,
            received.among(ids, sent.ids),
            round=number,
            seed=seed,
            limits=limits,
            engine=engine,
            staleness=number - done.arrived.version[np.searchsorted(ids, sent.ids)],
            late=done.late,
            secret=secret,
            usual=running_median(here.lengths),
        )
        if ended.problem is not None:  # before anything is kept: the last snapshot can be resumed
            raise ended.problem
        cohort, alone = ended.cohort, _moves_alone(server)
        here = Snapshot(
            round=number + 1,
            server=ended.state,
            memory=engine.recall(),
            losses=_losses(done.losses, cohort),
            bad_rounds=0 if len(cohort) or alone else here.bad_rounds + 1,
            lengths=here.lengths if ended.length is None else (*here.lengths, ended.length)[-REMEMBERED:],
            pending=done.pending.tidy().tree(),
        )
        yield Round(
            number=number + 1,
            model=server.model(ended.state),
            cohort=cohort,
            chosen=done.chosen,
            notes=ended.notes,
            bytes_down=done.down,
            bytes_up=sent.nbytes() + done.up + ended.up,
            clock=done.pending.clock,
            snapshot=here,
        )
        if here.bad_rounds >= max_bad_rounds:
            raise Diverged(_explain(cohort, number + 1, max_bad_rounds))


class Conclusion(NamedTuple):
    """The result of a round's replies; with a problem, the state is the one before."""

    state: Tree
    cohort: Cohort  # the replies that were used
    sound: np.ndarray  # ids of those that passed every check, also where they were too few to be used
    notes: Notes
    up: int  # bytes of the post-training pass
    length: float | None = None  # the median update, before any was clipped, where `Limits.max_growth` is set
    problem: Diverged | Invalid | None = None  # why the server cannot continue from this round


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
    usual: float | None = None,
) -> Conclusion:
    """All that follows an exchange: decode, screen, post-training pass, update, refuse what cannot be used.

    received: what the clients of `sent` received, in their order. staleness: [m] how many rounds ago that was.
    usual: the length that updates had in the rounds before, for `limits.max_growth`.
    engine: needed where clients are asked about their trained model, and where the server trains. secret: the round's
    key, where the server draws from one.
    """
    server = algorithm.server
    decoded = algorithm.channel.decode(sent, received, key(seed, "decode", round))
    cohort = labelled(replace(decoded, seed=seed), sent.ids, received, staleness, late)
    independent = capability(server, IndependentReplies)
    if independent is not None and independent.independent_replies:
        limits = replace(
            limits or Limits(), max_ratio=None, max_growth=None
        )  # the median would let one client decide about another
    cohort, length = _screened(cohort, received.among(sent.ids, cohort.ids), limits, usual)
    cohort, looked = _look_back(algorithm, engine, cohort, received.among(sent.ids, cohort.ids), seed)
    sound, cohort = cohort.ids, if_enough(cohort, limits)
    nothing = Conclusion(state, cohort, sound, {}, looked.up, length if len(cohort) else None)
    if not len(cohort) and not _moves_alone(server):
        return nothing  # a round without a usable reply changes nothing
    try:
        given = cohort if secret is None else replace(cohort, secret=secret)  # for the rule alone
        after, notes = server.update(state, given)
        training = capability(server, TrainsModel)
        if len(cohort) and training is not None:
            if not isinstance(engine, HasTask):
                raise Invalid(f"{type(server).__name__} trains a model itself, but {type(engine).__name__} runs none")
            after = training.train(engine.task, after, cohort)
        after = tree.here(after)  # what a rule kept of replies that lie in other processes
        _refuse_unusable(round, notes.get("weights"), server.model(after))
    except (Diverged, Invalid) as problem:
        return nothing._replace(problem=problem)
    return nothing._replace(state=after, notes=notes)


def _screened(
    cohort: Cohort, received: Broadcast, limits: Limits | None, usual: float | None
) -> tuple[Cohort, float | None]:
    """The usable replies; and, where updates may grow only so much, their median length before any is clipped."""
    everyone = cohort.ids
    if limits is None or limits.max_growth is None:
        return screen(cohort, received, limits), None
    checked = screen(cohort, received, replace(limits, max_growth=None))
    length = median_length(checked, received.among(everyone, checked.ids))
    return screen(cohort, received, limits, usual), length


def _moves_alone(server: ServerRule) -> bool:
    moving = capability(server, MovesWithoutReplies)
    return moving is not None and moving.moves_without_replies


def _look(
    algorithm: Algorithm, engine: Engine, received: Broadcast, ids: np.ndarray, round: int, seed: int
) -> Broadcast:
    """The broadcast with the results of the pre-training pass, where the rule has one."""
    looking = capability(algorithm.client, PreTrainingPass)
    if looking is None or not len(ids):
        return received
    found = engine.exchange(looking.pre_training, Plain(), received, ids, round=round, seed=seed)
    if not len(found):
        return received

    def spread(leaf: Tensor) -> Tensor:  # [found, ...] -> [m, ...]: 0 for clients without rows
        where = torch.from_numpy(np.searchsorted(ids, found.ids)).to(leaf.device)
        return leaf.new_zeros(len(ids), *leaf.shape[1:]).index_copy(0, where, leaf)

    seen = tree.map_leaves(spread, found.reply)
    return Broadcast(shared=received.shared, personal={**received.personal, "seen": seen})


def _look_back(
    algorithm: Algorithm, engine: Engine | None, cohort: Cohort, received: Broadcast, seed: int
) -> tuple[Cohort, QueryCost]:
    """The cohort with the results of the post-training pass; the clients hold these models already."""
    looking = capability(algorithm.client, PostTrainingPass)
    if engine is None or looking is None or not len(cohort):
        return cohort, QueryCost()
    shared, personal = {"received": received.shared}, {"model": cohort.reply["model"]}
    if received.personal:  # part of the broadcast was personal
        common = tree.map_leaves(lambda leaf: leaf.expand(len(cohort), *leaf.shape), received.shared)
        shared, personal = {}, {**personal, "received": {**common, **received.personal}}
    own = Broadcast(shared=shared, personal=personal)
    answer = engine.exchange(looking.post_training, Plain(), own, cohort.ids, round=cohort.round, seed=seed)
    seen = screen(answer)
    if len(seen) < len(cohort):  # clients that do not answer this as well are left out
        cohort = cohort.only(np.isin(cohort.ids, seen.ids), **seen.counts).refusing(seen.refusals)
    return replace(cohort, reply={**cohort.reply, **seen.reply}), QueryCost(up=answer.nbytes())


def _refuse_unusable(round: int, weights: Tensor | None, model: Tree) -> None:
    """Stop, before anything is kept, at weights or at a model that the next round could not use."""
    if weights is not None and not (bool(weights.isfinite().all()) and bool((weights != 0).any())):
        found = ", ".join(f"{weight:g}" for weight in weights.tolist()[:8])
        raise Diverged(f"round {round + 1}: the aggregation weights are {found} ..., all zero or not finite")
    what = unusable(model)
    if what:
        raise Diverged(
            f"round {round + 1}: the new global model {what}, though every reply could be used: lower the learning "
            f"rate. Nothing of this round is kept; "
            + (f"round {round} is the last good one" if round else "there is no good round before it")
        )


def _first(algorithm: Algorithm, engine: Engine, start: Tree | None) -> Snapshot:
    start = engine.start() if start is None else start
    clients = len(engine.sizes)
    nothing = np.full(clients, np.nan)
    server = algorithm.server.init(start, clients)
    sized = capability(algorithm.server, ReceivesSizes)
    if sized is not None:
        server = sized.receive_sizes(server, engine.sizes)
    return Snapshot(round=0, server=server, memory={}, losses=nothing)


def _losses(known: np.ndarray, cohort: Cohort) -> np.ndarray:
    if not len(cohort) or "loss" not in cohort.reply:
        return known
    known, trained = known.copy(), cohort.steps > 0
    known[cohort.ids[trained]] = cohort.reply["loss"].to(torch.float64).cpu().numpy()[trained]
    return known


def _explain(cohort: Cohort, round: int, limit: int) -> str:
    missing = {reason: count for reason, count in cohort.counts.items() if reason != "clipped_updates"}
    why = ", ".join(f"{count} {reason}" for reason, count in missing.items()) or "no client was available"
    why += ", fewer than limits.min_valid" if "too_few" in missing else ""
    return (
        f"{limit} rounds in a row, up to round {round}, had no usable reply ({why}). The model is unchanged since. "
        "If clients diverge, lower the learning rate; if they are silent or late, check the environment."
    )
