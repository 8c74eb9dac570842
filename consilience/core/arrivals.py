"""Dispatching clients and waiting for their replies, in simulated time."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import Buffers, QueriesBeforeSelection, ReceivesSchedule, capability
from consilience.core.client_flags import AllBut
from consilience.core.evaluate import LossQuery
from consilience.core.exchange import Broadcast, Cohort, Pool, Presence, WaitPolicy
from consilience.core.pending import Jobs, PendingReplies
from consilience.core.protocols import Channel, ClientRule, Engine, KeepsTime, NamesEmptyClients, PlansSteps
from consilience.core.rng import host
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.core.versions import ClientVector


def labelled(
    cohort: Cohort, sent_to: np.ndarray, received: Broadcast, staleness: np.ndarray | None, late: int
) -> Cohort:
    """The cohort with the staleness of its clients' models, if any is stale."""
    counts = {**cohort.counts, "late": late} if late else cohort.counts
    ages = None if staleness is None else staleness[np.searchsorted(sent_to, cohort.ids)]
    if ages is None or not ages.any():
        return replace(cohort, counts=counts)
    return replace(cohort, counts=counts, staleness=ages, received=received.among(sent_to, cohort.ids))


class Pace(NamedTuple):
    """When a round ends: after `buffer` replies (None: all), with at most `max_concurrency` clients at work."""

    buffer: int | None
    max_concurrency: int | None
    wait_policy: WaitPolicy


def pace_of(algorithm: Algorithm, engine: Engine) -> Pace:
    wait_policy = engine.wait_policy if isinstance(engine, KeepsTime) else WaitPolicy(timeless=True)
    buffers = capability(algorithm.server, Buffers)
    if buffers is None:
        return Pace(None, None, wait_policy)
    buffer, max_concurrency = buffers.buffer, buffers.concurrency
    if wait_policy.enough_replies is not None:
        raise Invalid(
            f"environment.enough_replies = {wait_policy.enough_replies} ends a synchronous round early, but "
            f"{type(algorithm.server).__name__} has a buffer of {buffer} replies and no such rounds: leave one out"
        )
    if wait_policy.partial_work:
        raise Invalid(
            f"environment.stragglers cuts the work of a synchronous round short, but {type(algorithm.server).__name__} "
            "lets slow clients finish later: use environment.speed_spread or jitter instead"
        )
    return Pace(buffer, max_concurrency, wait_policy)


class LoopState(Protocol):
    """The state of the training loop between two rounds."""

    @property
    def round(self) -> int:
        """Rounds finished."""
        ...

    @property
    def server(self) -> Tree:
        """The server's state."""
        ...

    @property
    def losses(self) -> ClientVector:
        """[K] last reported loss of each client."""
        ...


NOTHING = Broadcast(shared={})


class Replies(NamedTuple):
    """The replies of a round."""

    arrived: Jobs  # by client
    pending: PendingReplies
    chosen: np.ndarray  # clients dispatched during the round
    losses: ClientVector  # [K] last reported
    received: Broadcast = NOTHING  # what the arrived clients were sent
    late: int = 0
    down: int = 0  # bytes
    up: int = 0  # bytes, apart from the replies


def gather(
    algorithm: Algorithm,
    engine: Engine,
    here: LoopState,
    pending: PendingReplies,
    pace: Pace,
    seed: int,
    secret: bytes | None = None,
) -> Replies:
    """Dispatch clients and advance the simulated time until enough replies have arrived."""
    clients = len(engine.sizes)
    done = Replies(Jobs(), pending, np.empty(0, np.int64), here.losses)
    while True:
        done = _dispatch(algorithm, engine, here, done, pace, seed, secret)
        if not len(done.pending.jobs):
            break  # no client is available
        done = _wait(done, pace)
        if pace.buffer is None or len(done.arrived) >= pace.buffer or done.late > clients:
            break
    arrived, pending = done.arrived.take(np.argsort(done.arrived.ids)), done.pending
    in_use = {version: pending.sent[version] for version in np.unique(pending.jobs.version).tolist()}
    return done._replace(arrived=arrived, received=pending.received(arrived), pending=replace(pending, sent=in_use))


def _wait(done: Replies, pace: Pace) -> Replies:
    """Advance the simulated time to the next arrivals, or to the end of a synchronous round."""
    if pace.buffer is not None:
        pending, ended = done.pending.pop_arrived(pace.buffer - len(done.arrived), one_instant=True)
        stopped = 0
    else:
        pending, ended = done.pending.pop_arrived(
            pace.wait_policy.enough_replies or len(done.pending.jobs), one_instant=False
        )
        stopped, pending = len(pending.jobs), replace(pending, jobs=Jobs())  # clients still at work are stopped
    arrived = done.arrived.join(ended.take(np.flatnonzero(~ended.lost)))
    return done._replace(arrived=arrived, pending=pending, late=done.late + int(ended.lost.sum()) + stopped)


def _dispatch(
    algorithm: Algorithm, engine: Engine, here: LoopState, done: Replies, pace: Pace, seed: int, secret: bytes | None
) -> Replies:
    """Send the current model to idle clients, up to `max_concurrency` at work."""
    pending, server = done.pending, algorithm.server
    max_concurrency = None if pace.max_concurrency is None else pace.max_concurrency - len(pending.jobs)
    if max_concurrency == 0:
        return done
    turn = pending.dispatches  # equals the round where clients are chosen once a round
    busy = np.union1d(pending.jobs.ids, done.arrived.ids)  # a client in the buffer would start from the same model
    pool, absent = pool_of(engine, pending, done.losses, busy, seed, secret)
    asking, losses, asked = capability(algorithm.selection, QueriesBeforeSelection), done.losses, QueryCost()
    if asking is not None:
        model, timeless = server.model(here.server), pace.wait_policy.timeless
        pool, losses, asked = _ask(asking, engine, pool, losses, model, turn, seed, timeless=timeless)
    chosen = np.unique(algorithm.selection.choose(turn, pool, seed))  # ascending, no client twice
    chosen = chosen[~np.isin(chosen, busy)]
    if max_concurrency is not None and len(chosen) > max_concurrency:
        # the purpose "seats" is older than the word max_concurrency; another text would draw other clients
        chosen = np.sort(host(seed, "seats", turn).choice(chosen, max_concurrency, replace=False))
    scheduled = capability(server, ReceivesSchedule)
    if scheduled is None:
        broadcast = server.broadcast(here.server, chosen)
    else:
        broadcast = _scheduled(scheduled, algorithm, engine, here.server, chosen, turn, seed)
    took = np.zeros(len(chosen))
    if not pace.wait_policy.timeless:
        took = _seconds(engine, algorithm.client, algorithm.channel, broadcast, chosen, turn, seed)
    limit = np.inf if pace.wait_policy.deadline is None else pace.wait_policy.deadline
    pending = pending.send(chosen, broadcast, here.round, took, delay=asked.seconds, limit=limit)
    return done._replace(
        pending=replace(pending, dispatches=turn + 1, absent=absent),
        chosen=np.sort(np.concatenate([done.chosen, chosen])),
        losses=losses,
        down=done.down + broadcast.nbytes(len(chosen)) + asked.down,
        up=done.up + asked.up,
    )


def pool_of(
    engine: Engine, pending: PendingReplies, losses: ClientVector, busy: np.ndarray, seed: int, secret: bytes | None
) -> tuple[Pool, ClientVector]:
    """(what the server knows of the clients at the next selection, how often each was unavailable by then)."""
    turn = pending.dispatches
    available = engine.available(turn, seed)
    free: np.ndarray | AllBut
    if isinstance(available, AllBut):
        away, free = available.away, available.without(busy) if len(busy) else available
    else:
        flags = available.copy()
        flags[busy] = False
        away, free = np.flatnonzero(~available), flags
    absent = pending.absent.write(away, pending.absent[away] + 1) if len(away) else pending.absent
    pool = Pool(
        sizes=engine.sizes,
        losses=losses,  # type: ignore[arg-type]
        available=free,  # type: ignore[arg-type]
        presence=Presence(absent, turn + 1),
        seconds=pending.took,  # type: ignore[arg-type]
        secret=secret,
        empty=engine.empty if isinstance(engine, NamesEmptyClients) else None,
    )
    return pool, absent


def _seconds(
    engine: Engine, client: ClientRule, channel: Channel, broadcast: Broadcast, ids: np.ndarray, round: int, seed: int
) -> np.ndarray:
    """[m] simulated seconds until each reply arrives."""
    assert isinstance(engine, KeepsTime)
    if not len(ids):
        return np.zeros(0)
    return engine.seconds(client, channel, broadcast, ids, round=round, seed=seed)


class QueryCost(NamedTuple):
    """Cost of a query: bytes, and seconds until the last reply."""

    down: int = 0
    up: int = 0
    seconds: float = 0.0


def _ask(
    asking: QueriesBeforeSelection,
    engine: Engine,
    pool: Pool,
    losses: ClientVector,
    model: Tree,
    round: int,
    seed: int,
    *,
    timeless: bool,
) -> tuple[Pool, ClientVector, QueryCost]:
    """The pool with the losses, at the current model, of the clients that the selection queries."""
    ids = np.unique(asking.queries(round, pool, seed))
    if not len(ids):
        return pool, losses, QueryCost()
    question = Broadcast(shared={"model": model})
    answer = engine.exchange(LossQuery(), Plain(), question, ids, round=round, seed=seed)
    seconds = 0.0 if timeless else float(_seconds(engine, LossQuery(), Plain(), question, ids, round, seed).max())
    if len(answer):
        found = (answer.reply["loss"] / answer.reply["rows"]).cpu().numpy()
        losses = losses.write(answer.ids, np.where(np.isfinite(found), found, np.nan))  # of no rows: not known
    cost = QueryCost(question.nbytes(len(ids)), answer.nbytes(), seconds)
    return pool.knowing(losses=losses), losses, cost


def _scheduled(
    scheduled: ReceivesSchedule,
    algorithm: Algorithm,
    engine: Engine,
    state: Tree,
    ids: np.ndarray,
    round: int,
    seed: int,
) -> Broadcast:
    """The broadcast of a rule that depends on the planned steps."""
    if not isinstance(engine, PlansSteps):
        raise Invalid(
            f"{type(algorithm.server).__name__} must know each client's steps before a round, which "
            f"{type(engine).__name__} cannot plan: use another engine, or another algorithm"
        )
    steps = engine.planned(algorithm.client, ids, round=round, seed=seed)
    return scheduled.broadcast_for(state, ids, torch.from_numpy(engine.sizes[ids]).to(torch.float64), steps)
