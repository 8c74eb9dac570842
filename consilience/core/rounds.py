"""The only training loop in the library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.chance import key
from consilience.core.evaluate import Evaluate
from consilience.core.exchange import Broadcast, Cohort, Notes, Pool
from consilience.core.plans import Work
from consilience.core.protocols import AsksFirst, Engine
from consilience.core.tree import Tree

LOOK = Work(epochs=1, batch_size=256, shuffle=False, trains=False)


class Diverged(RuntimeError):
    """Too many rounds in a row brought no usable reply."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """All that the next round depends on: saving it and going on is the same as never having stopped."""

    round: int  # rounds finished
    server: Tree
    memory: Tree
    losses: np.ndarray  # [K] last loss each client reported
    bad_rounds: int = 0


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
) -> Iterator[Round]:
    """Train, yielding each finished round; whatever observes (reports, checkpoints, early stopping) consumes this."""
    here = resume or _first(algorithm, engine, start)
    engine.restore(here.memory)
    server = algorithm.server
    for number in range(here.round, rounds):
        pool = Pool(sizes=engine.sizes, losses=here.losses, available=engine.available(number, seed))
        pool, asked = _ask(algorithm, engine, pool, server.model(here.server), number, seed)
        chosen = np.unique(algorithm.selection.choose(number, pool, seed))  # ascending, nobody twice
        broadcast = server.broadcast(here.server, chosen)
        sent = engine.exchange(algorithm.client, algorithm.channel, broadcast, chosen, round=number, seed=seed)
        received = broadcast.among(chosen, sent.ids)
        cohort = screen(algorithm.channel.decode(sent, received, key(seed, "decode", number)))
        # a round without a usable reply changes nothing
        state, notes = server.update(here.server, cohort) if len(cohort) else (here.server, {})
        _refuse_unusable(number + 1, notes.get("weights"), server.model(state))
        here = Snapshot(
            round=number + 1,
            server=state,
            memory=engine.recall(),
            losses=_losses(pool.losses, cohort),
            bad_rounds=0 if len(cohort) else here.bad_rounds + 1,
        )
        yield Round(
            number=number + 1,
            model=server.model(state),
            cohort=cohort,
            chosen=chosen,
            notes=notes,
            bytes_down=broadcast.nbytes(len(chosen)) + asked.down,
            bytes_up=sent.nbytes() + asked.up,
            snapshot=here,
        )
        if here.bad_rounds >= max_bad_rounds:
            raise Diverged(_explain(cohort, number + 1, max_bad_rounds))


class Asked(NamedTuple):
    """Traffic of the question before the choice."""

    down: int = 0
    up: int = 0


def _ask(algorithm: Algorithm, engine: Engine, pool: Pool, model: Tree, round: int, seed: int) -> tuple[Pool, Asked]:
    """The pool with the losses at the current model of those that the selection asks."""
    if not isinstance(algorithm.selection, AsksFirst):
        return pool, Asked()
    ids = np.unique(algorithm.selection.asks(round, pool, seed))
    if not len(ids):
        return pool, Asked()
    question = Broadcast(shared={"model": model})
    answer = engine.exchange(Evaluate(work=LOOK), Plain(), question, ids, round=round, seed=seed)
    losses = pool.losses.copy()
    losses[answer.ids] = (answer.reply["loss"] / answer.reply["rows"]).cpu().numpy()
    return replace(pool, losses=losses), Asked(question.nbytes(len(ids)), answer.nbytes())


def screen(cohort: Cohort) -> Cohort:
    """Drop replies that hold NaN or infinite values, and count them: they never touch the model."""
    if not len(cohort):
        return cohort
    finite = tree.all_finite(cohort.reply).cpu().numpy()
    return cohort if finite.all() else cohort.only(finite, nonfinite=int((~finite).sum()))


def _refuse_unusable(round: int, weights: Tensor | None, model: Tree) -> None:
    """Stop, before anything is kept, at weights or at a model that cannot be right."""
    if weights is not None and not (bool(weights.isfinite().all()) and bool((weights != 0).any())):
        found = ", ".join(f"{weight:g}" for weight in weights.tolist()[:8])
        raise Diverged(f"round {round}: the aggregation weights are {found} ..., all zero or not finite")
    flat = {path: leaf for path, leaf in tree.flatten(model).items() if leaf.is_floating_point()}
    finite = torch.stack([leaf.sum(dtype=torch.float64).isfinite() for leaf in flat.values()]).tolist()
    if not all(finite):
        raise Diverged(
            f"round {round}: the new global model holds NaN or infinite values in "
            f"{list(flat)[finite.index(False)]}, though every reply was finite: lower the learning rate"
        )


def _first(algorithm: Algorithm, engine: Engine, start: Tree | None) -> Snapshot:
    start = engine.start() if start is None else start
    clients = len(engine.sizes)
    nothing = np.full(clients, np.nan)
    return Snapshot(round=0, server=algorithm.server.init(start, clients), memory={}, losses=nothing)


def _losses(known: np.ndarray, cohort: Cohort) -> np.ndarray:
    if not len(cohort) or "loss" not in cohort.reply:
        return known
    known, trained = known.copy(), cohort.steps > 0
    known[cohort.ids[trained]] = cohort.reply["loss"].to(torch.float64).cpu().numpy()[trained]
    return known


def _explain(cohort: Cohort, round: int, limit: int) -> str:
    why = ", ".join(f"{count} {reason}" for reason, count in cohort.counts.items()) or "nobody was available"
    return (
        f"{limit} rounds in a row, up to round {round}, brought no usable reply ({why}). The model is unchanged since. "
        "If clients diverge, lower the learning rate; if they are silent, check the environment."
    )
