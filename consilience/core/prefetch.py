"""Prepares the next round's batches while the device still computes this round."""

from __future__ import annotations

import numpy as np

from consilience.core.algorithm import Algorithm
from consilience.core.arrivals import Pace, Replies, pool_of
from consilience.core.capabilities import DrawsSecretly, QueriesBeforeSelection, capability
from consilience.core.client_flags import AllBut
from consilience.core.protocols import Engine, PreparesAhead

NOBODY = np.empty(0, dtype=np.int64)
MANY = 20_000  # clients: if availability is drawn for all, selecting among more costs the host as much time as it saves


class Prefetcher:
    """Predicts the next round's clients for an engine, where the selection does not depend on this round's replies.

    A selection is a pure function, so calling it before the replies arrive predicts the right clients, unless it reads
    losses. After the first wrong prediction the prepared batches are dropped and no further round is prepared.
    """

    def __init__(self, algorithm: Algorithm, engine: Engine, pace: Pace) -> None:
        secret = capability(algorithm.server, DrawsSecretly) is not None
        queries = capability(algorithm.selection, QueriesBeforeSelection) is not None
        known = not secret and not queries and pace.buffer is None
        able = known and isinstance(engine, PreparesAhead) and engine.prepares_ahead
        self._engine: PreparesAhead | None = engine if able else None  # type: ignore[assignment]
        self._algorithm = algorithm
        self._guess: np.ndarray | None = None

    def prepare(self, done: Replies, round: int, seed: int) -> None:
        """Let the engine prepare the batches of a round, from what is known of the previous round."""
        if self._engine is None:
            return
        if self._guess is not None and not np.array_equal(self._guess, done.arrived.ids):
            self._engine = None
            return
        turn, many = done.pending.dispatches, len(self._engine.sizes) > MANY
        if many and not isinstance(self._engine.available(turn, seed), AllBut):
            self._engine = None
            return
        pool, _ = pool_of(self._engine, done.pending, done.losses, NOBODY, seed, None)
        self._guess = np.unique(self._algorithm.selection.choose(turn, pool, seed))
        self._engine.prepare_round(self._algorithm.client, self._guess, round=round, seed=seed)
