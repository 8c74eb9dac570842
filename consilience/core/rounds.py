"""The only training loop in the library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.arrivals import Asked, gather, labelled, pace_of
from consilience.core.exchange import Broadcast, Cohort, Notes
from consilience.core.protocols import (
    ChecksSurroundings,
    Engine,
    HasTask,
    MovesWithoutReplies,
    PostTrainingPass,
    PreTrainingPass,
    ReceivesSizes,
    TrainsModel,
)
from consilience.core.rng import key
from consilience.core.round_keys import RoundKeys, fresh, key_for
from consilience.core.screening import Limits, if_enough
from consilience.core.screening import screen as screen
from consilience.core.settings import Invalid
from consilience.core.tree import Tree


class Diverged(RuntimeError):
    """Too many rounds in a row brought no usable reply."""


class TooFewClients(RuntimeError):
    """Not enough clients are there, or none of them answers: the last finished round is saved, and can be continued."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """All that the next round depends on: saving it and going on is the same as never having stopped."""

    round: int  # rounds finished
    server: Tree
    memory: Tree
    losses: np.ndarray  # [K] last loss each client reported
    bad_rounds: int = 0
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
    keys: RoundKeys = fresh,
) -> Iterator[Round]:
    """Train, yielding each finished round; whatever observes (reports, checkpoints, early stopping) consumes this.

    A round ends when enough replies are in: all that were asked for, or, where the server rule has a buffer, as many
    as that holds, while the other clients go on working from the model they were sent. Replies that break the `limits`
    are refused, and named in the cohort; with fewer than `limits.min_valid` left the round changes nothing.

    rounds: the last round's number; with `resume`, those done before count.
    seed: decides who is chosen, the batches and all luck (0).
    start: a model in place of the engine's; resume: the `snapshot` of a round, from which the rest is exactly the same.
    max_bad_rounds: so many rounds in a row without a usable reply raise `Diverged` (3).
    keys: where the secret of each round comes from, if the server rule draws noise that nobody may repeat; by default
    from the operating system. To repeat a round of such a rule, give it the same key.
    """
    if isinstance(algorithm.server, ChecksSurroundings):
        algorithm.server.check_surroundings(algorithm, engine, limits)
    here = resume or _first(algorithm, engine, start)
    engine.restore(here.memory)
    server, pace = algorithm.server, pace_of(algorithm, engine)
    for number in range(here.round, rounds):
        secret = key_for(server, number + 1, keys)
        done = gather(algorithm, engine, here, pace, seed, secret)
        ids, received = done.arrived.ids, done.pending.received(done.arrived)
        seen = _look(algorithm, engine, received, ids, number, seed)
        sent = engine.exchange(algorithm.client, algorithm.channel, seen, ids, round=number, seed=seed)
        decoded = algorithm.channel.decode(sent, received.among(ids, sent.ids), key(seed, "decode", number))
        cohort = labelled(replace(decoded, seed=seed), done.arrived, received, number, done.late)
        cohort = screen(cohort, received.among(ids, cohort.ids), limits)
        cohort, looked = _look_back(algorithm, engine, cohort, received.among(ids, cohort.ids), seed)
        cohort = if_enough(cohort, limits)
        alone = isinstance(server, MovesWithoutReplies) and server.moves_without_replies
        given = cohort if secret is None else replace(cohort, secret=secret)  # for the rule, and nobody after it
        # a round without a usable reply changes nothing
        state, notes = server.update(here.server, given) if len(cohort) or alone else (here.server, {})
        if len(cohort) and isinstance(server, TrainsModel):
            if not isinstance(engine, HasTask):
                raise Invalid(f"{type(server).__name__} trains a model itself, but {type(engine).__name__} runs none")
            state = server.train(engine.task, state, cohort)
        state = tree.here(state)  # what a rule kept of replies that lie in other processes
        _refuse_unusable(number + 1, notes.get("weights"), server.model(state))
        here = Snapshot(
            round=number + 1,
            server=state,
            memory=engine.recall(),
            losses=_losses(done.losses, cohort),
            bad_rounds=0 if len(cohort) or alone else here.bad_rounds + 1,
            pending=done.pending.tidy().tree(),
        )
        yield Round(
            number=number + 1,
            model=server.model(state),
            cohort=cohort,
            chosen=done.chosen,
            notes=notes,
            bytes_down=done.down,
            bytes_up=sent.nbytes() + done.up + looked.up,
            clock=done.pending.clock,
            snapshot=here,
        )
        if here.bad_rounds >= max_bad_rounds:
            raise Diverged(_explain(cohort, number + 1, max_bad_rounds))


def _look(
    algorithm: Algorithm, engine: Engine, received: Broadcast, ids: np.ndarray, round: int, seed: int
) -> Broadcast:
    """The broadcast with what each client sees in its own data, where its rule looks first."""
    if not isinstance(algorithm.client, PreTrainingPass) or not len(ids):
        return received
    found = engine.exchange(algorithm.client.pre_training, Plain(), received, ids, round=round, seed=seed)
    if not len(found):
        return received

    def spread(leaf: Tensor) -> Tensor:  # [found, ...] -> [m, ...]: who has no rows sees nothing
        where = torch.from_numpy(np.searchsorted(ids, found.ids)).to(leaf.device)
        return leaf.new_zeros(len(ids), *leaf.shape[1:]).index_copy(0, where, leaf)

    seen = tree.map_leaves(spread, found.reply)
    return Broadcast(shared=received.shared, personal={**received.personal, "seen": seen})


def _look_back(
    algorithm: Algorithm, engine: Engine, cohort: Cohort, received: Broadcast, seed: int
) -> tuple[Cohort, Asked]:
    """The cohort with what each client's trained model shows on its rows; the client has these models already."""
    if not isinstance(algorithm.client, PostTrainingPass) or not len(cohort):
        return cohort, Asked()
    shared, personal = {"received": received.shared}, {"model": cohort.reply["model"]}
    if received.personal:  # some of what they were sent was for each alone
        common = tree.map_leaves(lambda leaf: leaf.expand(len(cohort), *leaf.shape), received.shared)
        shared, personal = {}, {**personal, "received": {**common, **received.personal}}
    own = Broadcast(shared=shared, personal=personal)
    answer = engine.exchange(algorithm.client.post_training, Plain(), own, cohort.ids, round=cohort.round, seed=seed)
    seen = screen(answer)
    if len(seen) < len(cohort):  # who does not answer this question, too, is left out
        cohort = cohort.only(np.isin(cohort.ids, seen.ids), **seen.counts).refusing(seen.refusals)
    return replace(cohort, reply={**cohort.reply, **seen.reply}), Asked(up=answer.nbytes())


def _refuse_unusable(round: int, weights: Tensor | None, model: Tree) -> None:
    """Stop, before anything is kept, at weights or at a model that cannot be right."""
    if weights is not None and not (bool(weights.isfinite().all()) and bool((weights != 0).any())):
        found = ", ".join(f"{weight:g}" for weight in weights.tolist()[:8])
        raise Diverged(f"round {round}: the aggregation weights are {found} ..., all zero or not finite")
    flat = {path: leaf for path, leaf in tree.flatten(model).items() if leaf.is_floating_point()}
    if not tree.is_finite(list(flat.values())):
        where = next(path for path, leaf in flat.items() if not bool(leaf.isfinite().all()))
        raise Diverged(
            f"round {round}: the new global model holds NaN or infinite values in {where}, "
            "though every reply was finite: lower the learning rate"
        )


def _first(algorithm: Algorithm, engine: Engine, start: Tree | None) -> Snapshot:
    start = engine.start() if start is None else start
    clients = len(engine.sizes)
    nothing = np.full(clients, np.nan)
    server = algorithm.server.init(start, clients)
    if isinstance(algorithm.server, ReceivesSizes):
        server = algorithm.server.receive_sizes(server, engine.sizes)
    return Snapshot(round=0, server=server, memory={}, losses=nothing)


def _losses(known: np.ndarray, cohort: Cohort) -> np.ndarray:
    if not len(cohort) or "loss" not in cohort.reply:
        return known
    known, trained = known.copy(), cohort.steps > 0
    known[cohort.ids[trained]] = cohort.reply["loss"].to(torch.float64).cpu().numpy()[trained]
    return known


def _explain(cohort: Cohort, round: int, limit: int) -> str:
    missing = {reason: count for reason, count in cohort.counts.items() if reason != "clipped_updates"}
    why = ", ".join(f"{count} {reason}" for reason, count in missing.items()) or "nobody was available"
    why += ", fewer than limits.min_valid" if "too_few" in missing else ""
    return (
        f"{limit} rounds in a row, up to round {round}, brought no usable reply ({why}). The model is unchanged since. "
        "If clients diverge, lower the learning rate; if they are silent or late, check the environment."
    )
