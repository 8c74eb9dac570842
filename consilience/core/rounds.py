"""The training loop: the only one in the library."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.arrivals import gather, pace_of
from consilience.core.capabilities import (
    ChecksSurroundings,
    DrawsSecretly,
    PreTrainingPass,
    ReceivesSizes,
    RoundKeys,
    capability,
)
from consilience.core.conclusion import Diverged, conclude
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.pending import PendingReplies
from consilience.core.prefetch import Prefetcher
from consilience.core.protocols import Engine
from consilience.core.screening import REMEMBERED, Limits
from consilience.core.tree import Tree
from consilience.core.versions import ClientVector


class TooFewClients(RuntimeError):
    """Too few clients are connected, or none replies; the last finished round is saved and can be resumed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """Everything that the next round depends on: a run resumed from it gives the same results as an uninterrupted one.

    Per-client data (memories, losses, times) are stored as versions that share unchanged values, so a snapshot is cheap
    to keep and later rounds do not change it.
    """

    round: int  # rounds finished
    server: Tree
    memory: Tree
    losses: ClientVector  # [K] last loss each client reported; an array is accepted
    bad_rounds: int = 0
    lengths: tuple[float, ...] = ()  # median update length of the last rounds, if `Limits.max_growth` is set
    pending: Tree = field(default_factory=dict)  # the simulated time, the clients at work and their broadcasts

    def __post_init__(self) -> None:
        if not isinstance(self.losses, ClientVector):
            object.__setattr__(self, "losses", ClientVector.of(self.losses, np.nan))


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
    """Train, yielding each finished round; reports, checkpoints and early stopping consume this generator.

    A round ends when all replies have arrived or, if the server rule has a buffer, when the buffer is full, while the
    other clients keep working from the model they received. Replies that break the `limits` are refused and listed in
    the cohort; with fewer than `limits.min_valid` left the round changes nothing.

    rounds: the last round's number; with `resume`, those done before count.
    seed: determines the selection, the batches and all other random draws (0).
    start: an initial model in place of the engine's; resume: the `snapshot` of a round to continue from.
    max_bad_rounds: this many rounds in a row without a usable reply raise `Diverged` (3).
    keys: the source of each round's secret key, if the server rule draws secret noise (`DrawsSecretly`); by default the
    operating system. To repeat a round of such a rule, give it the same key.
    """
    surroundings = capability(algorithm.server, ChecksSurroundings)
    if surroundings is not None:
        surroundings.check_surroundings(algorithm, engine, limits)
    here = resume or _first(algorithm, engine, start)
    engine.restore(here.memory)
    server, pace = algorithm.server, pace_of(algorithm, engine)
    secret_draws, prefetcher = capability(server, DrawsSecretly), Prefetcher(algorithm, engine, pace)
    before_training = capability(algorithm.client, PreTrainingPass)
    pending = PendingReplies.of(here.pending, len(engine.sizes), here.round)
    for number in range(here.round, rounds):
        secret = None if secret_draws is None else secret_draws.round_key(number + 1, keys)
        done = gather(algorithm, engine, here, pending, pace, seed, secret)
        pending, ids, received = done.pending, done.arrived.ids, done.received
        seen = (
            received
            if before_training is None
            else _with_pre_training(before_training, engine, received, ids, number, seed)
        )
        sent = engine.exchange(algorithm.client, algorithm.channel, seen, ids, round=number, seed=seed)
        prepare = functools.partial(prefetcher.prepare, done, number + 1, seed) if number + 1 < rounds else None
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
            lengths=here.lengths,
            meanwhile=prepare,
        )
        if ended.problem is not None:  # before the state is replaced: the last snapshot can be resumed
            raise ended.problem
        cohort = ended.cohort
        here = Snapshot(
            round=number + 1,
            server=ended.state,
            memory=engine.recall(),
            losses=_losses(done.losses, cohort, ended.losses),
            bad_rounds=0 if ended.updated else here.bad_rounds + 1,
            lengths=here.lengths if ended.length is None else (*here.lengths, ended.length)[-REMEMBERED:],
            pending=pending.tree(),
        )
        yield Round(
            number=number + 1,
            model=server.model(ended.state),
            cohort=cohort,
            chosen=done.chosen,
            notes=ended.notes,
            bytes_down=done.down,
            bytes_up=sent.nbytes() + done.up + ended.up,
            clock=pending.clock,
            snapshot=here,
        )
        if here.bad_rounds >= max_bad_rounds:
            raise Diverged(_explain(cohort, number + 1, max_bad_rounds))


def _with_pre_training(
    before_training: PreTrainingPass, engine: Engine, received: Broadcast, ids: np.ndarray, round: int, seed: int
) -> Broadcast:
    """The broadcast with the results of the pre-training pass."""
    if not len(ids):
        return received
    found = engine.exchange(before_training.pre_training, Plain(), received, ids, round=round, seed=seed)
    if not len(found):
        return received

    def spread(leaf: Tensor) -> Tensor:  # [found, ...] -> [m, ...]: 0 for clients without rows
        where = torch.from_numpy(np.searchsorted(ids, found.ids)).to(leaf.device)
        return leaf.new_zeros(len(ids), *leaf.shape[1:]).index_copy(0, where, leaf)

    seen = tree.map_leaves(spread, found.reply)
    return Broadcast(shared=received.shared, personal={**received.personal, "seen": seen})


def _first(algorithm: Algorithm, engine: Engine, start: Tree | None) -> Snapshot:
    start = engine.start() if start is None else start
    clients = len(engine.sizes)
    nothing = ClientVector.filled(clients, np.nan, np.float64)
    server = algorithm.server.init(start, clients)
    sized = capability(algorithm.server, ReceivesSizes)
    if sized is not None:
        server = sized.receive_sizes(server, engine.sizes)
    return Snapshot(round=0, server=server, memory={}, losses=nothing)


def _losses(known: ClientVector, cohort: Cohort, fetched: np.ndarray | None) -> ClientVector:
    if not len(cohort) or "loss" not in cohort.reply:
        return known
    trained = cohort.steps > 0
    losses = cohort.reply["loss"].to(torch.float64).cpu().numpy() if fetched is None else fetched
    return known.write(cohort.ids[trained], losses[trained])


def _explain(cohort: Cohort, round: int, limit: int) -> str:
    missing = {reason: count for reason, count in cohort.counts.items() if reason != "clipped_updates"}
    why = ", ".join(f"{count} {reason}" for reason, count in missing.items()) or "no client was available"
    why += ", fewer than limits.min_valid" if "too_few" in missing else ""
    return (
        f"{limit} rounds in a row, up to round {round}, had no usable reply ({why}). The model is unchanged since. "
        "If clients diverge, lower the learning rate; if they are silent or late, check the environment."
    )
