"""Sending clients to work and waiting for their replies, in simulated time."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from consilience.core.algorithm import Algorithm, Plain
from consilience.core.chance import draws
from consilience.core.checks import Invalid
from consilience.core.evaluate import Evaluate
from consilience.core.exchange import Broadcast, Pool
from consilience.core.flight import Flight, Jobs, Patience
from consilience.core.plans import Work
from consilience.core.protocols import AsksFirst, Buffers, Channel, ClientRule, Engine, KeepsTime, KnowsWork
from consilience.core.tree import Tree

LOOK = Work(epochs=1, batch_size=256, shuffle=False, trains=False)


class Pace(NamedTuple):
    """When a round ends: `buffer` replies (None: all), at most `seats` clients at work, and the server's patience."""

    buffer: int | None
    seats: int | None
    patience: Patience


def pace_of(algorithm: Algorithm, engine: Engine) -> Pace:
    patience = engine.patience if isinstance(engine, KeepsTime) else Patience()
    if not isinstance(algorithm.server, Buffers):
        return Pace(None, None, patience)
    buffer, seats = algorithm.server.buffer, algorithm.server.concurrency
    if patience.first is not None:
        raise Invalid(
            f"environment.first = {patience.first} ends a synchronous round early, but "
            f"{type(algorithm.server).__name__} has a buffer of {buffer} replies and no such rounds: leave one out"
        )
    if patience.partial_work:
        raise Invalid(
            f"environment.stragglers cuts the work of a synchronous round short, but {type(algorithm.server).__name__} "
            "lets slow clients finish later: use environment.speed_spread or jitter instead"
        )
    return Pace(buffer, seats, patience)


class Here(Protocol):
    """What the loop knows between two rounds."""

    @property
    def round(self) -> int:
        """Rounds finished."""
        ...

    @property
    def server(self) -> Tree:
        """The server's state."""
        ...

    @property
    def losses(self) -> np.ndarray:
        """[K] as last reported."""
        ...

    @property
    def in_flight(self) -> Tree:
        """The clock, and who is at work."""
        ...


class Replies(NamedTuple):
    """What a round waited for."""

    landed: Jobs  # by client
    flight: Flight
    chosen: np.ndarray  # those sent to work meanwhile
    losses: np.ndarray  # [K] as known now
    late: int = 0
    down: int = 0  # bytes
    up: int = 0  # bytes, apart from the replies


def gather(algorithm: Algorithm, engine: Engine, here: Here, pace: Pace, seed: int) -> Replies:
    """Send clients to work, and let time pass until enough replies are in."""
    clients = len(engine.sizes)
    flight = Flight.of(here.in_flight, clients, here.round)
    done = Replies(Jobs(), flight, np.empty(0, np.int64), here.losses)
    while True:
        done = _dispatch(algorithm, engine, here, done, pace, seed)
        if not len(done.flight.jobs):
            break  # nobody is there
        done = _wait(done, pace)
        if pace.buffer is None or len(done.landed) >= pace.buffer or done.late > clients:
            break
    return done._replace(landed=done.landed.take(np.argsort(done.landed.ids)))


def _wait(done: Replies, pace: Pace) -> Replies:
    """Let time pass: to the next arrivals, or to the end of a synchronous round."""
    if pace.buffer is not None:
        flight, ended = done.flight.land(pace.buffer - len(done.landed), one_instant=True)
        stopped = 0
    else:
        flight, ended = done.flight.land(pace.patience.first or len(done.flight.jobs), one_instant=False)
        stopped, flight = len(flight.jobs), replace(flight, jobs=Jobs())  # whoever is still at work is told to stop
    landed = done.landed.join(ended.take(np.flatnonzero(~ended.lost)))
    return done._replace(landed=landed, flight=flight, late=done.late + int(ended.lost.sum()) + stopped)


def _dispatch(algorithm: Algorithm, engine: Engine, here: Here, done: Replies, pace: Pace, seed: int) -> Replies:
    """Fill the free seats with clients that are idle, and send them the current model."""
    flight, server = done.flight, algorithm.server
    seats = None if pace.seats is None else pace.seats - len(flight.jobs)
    if seats == 0:
        return done
    turn = flight.dispatches  # equals the round where clients are chosen once a round
    idle = np.ones(len(engine.sizes), dtype=bool)
    idle[flight.jobs.ids] = idle[done.landed.ids] = False  # who waits in the buffer would start from the same model
    available = engine.available(turn, seed)
    present = flight.present + available
    pool = Pool(
        sizes=engine.sizes,
        losses=done.losses,
        available=available & idle,
        presence=present / (turn + 1),
        seconds=flight.took,
    )
    pool, asked = _ask(algorithm, engine, pool, server.model(here.server), turn, seed)
    chosen = np.unique(algorithm.selection.choose(turn, pool, seed))  # ascending, nobody twice
    chosen = chosen[idle[chosen]]
    if seats is not None and len(chosen) > seats:
        chosen = np.sort(draws(seed, "seats", turn).choice(chosen, seats, replace=False))
    broadcast = _broadcast(algorithm, engine, here.server, chosen, turn, seed)
    took = _seconds(engine, algorithm.client, algorithm.channel, broadcast, chosen, turn, seed)
    limit = np.inf if pace.patience.deadline is None else pace.patience.deadline
    flight = flight.send(chosen, broadcast, here.round, took, delay=asked.seconds, limit=limit)
    return done._replace(
        flight=replace(flight, dispatches=turn + 1, present=present),
        chosen=np.sort(np.concatenate([done.chosen, chosen])),
        losses=pool.losses,
        down=done.down + broadcast.nbytes(len(chosen)) + asked.down,
        up=done.up + asked.up,
    )


def _seconds(
    engine: Engine, client: ClientRule, channel: Channel, broadcast: Broadcast, ids: np.ndarray, round: int, seed: int
) -> np.ndarray:
    """[m] simulated seconds until each reply is there: none without a clock."""
    if not isinstance(engine, KeepsTime) or not len(ids):
        return np.zeros(len(ids))
    return engine.seconds(client, channel, broadcast, ids, round=round, seed=seed)


class Asked(NamedTuple):
    """What the question before the choice costs: bytes, and seconds until the last answer."""

    down: int = 0
    up: int = 0
    seconds: float = 0.0


def _ask(algorithm: Algorithm, engine: Engine, pool: Pool, model: Tree, round: int, seed: int) -> tuple[Pool, Asked]:
    """The pool with the losses at the current model of those that the selection asks."""
    if not isinstance(algorithm.selection, AsksFirst):
        return pool, Asked()
    ids = np.unique(algorithm.selection.asks(round, pool, seed))
    if not len(ids):
        return pool, Asked()
    question = Broadcast(shared={"model": model})
    answer = engine.exchange(Evaluate(work=LOOK), Plain(), question, ids, round=round, seed=seed)
    seconds = _seconds(engine, Evaluate(work=LOOK), Plain(), question, ids, round, seed)
    losses = pool.losses.copy()
    if len(answer):
        losses[answer.ids] = (answer.reply["loss"] / answer.reply["rows"]).cpu().numpy()
    return replace(pool, losses=losses), Asked(question.nbytes(len(ids)), answer.nbytes(), float(seconds.max()))


def _broadcast(algorithm: Algorithm, engine: Engine, state: Tree, ids: np.ndarray, round: int, seed: int) -> Broadcast:
    """What the server sends, knowing the work ahead where it has to."""
    server = algorithm.server
    if not isinstance(server, KnowsWork):
        return server.broadcast(state, ids)
    if not hasattr(engine, "planned"):
        raise Invalid(
            f"{type(server).__name__} must know each client's steps before a round, which {type(engine).__name__} "
            "cannot tell: use another engine, or another algorithm"
        )
    steps = engine.planned(algorithm.client, ids, round=round, seed=seed)
    return server.broadcast_for(state, ids, torch.from_numpy(engine.sizes[ids]).to(torch.float64), steps)
