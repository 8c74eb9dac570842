"""The next round's batches, prepared while a device is still busy with this round's."""

from __future__ import annotations

import numpy as np

from consilience.core.algorithm import Algorithm
from consilience.core.arrivals import Pace, Replies, pool_of
from consilience.core.capabilities import DrawsSecretly, QueriesBeforeSelection, capability
from consilience.core.client_flags import AllBut
from consilience.core.protocols import Engine, PreparesAhead

NOBODY = np.empty(0, dtype=np.int64)
MANY = 20_000  # clients: where flags of all are drawn, choosing among more takes the host as long as it saves


class Ahead:
    """Tells an engine who will work next, as far as that does not depend on this round's replies.

    A selection is a function of its arguments: with what is known before the replies it gives the right clients, or,
    where it reads losses, perhaps others. Then what was prepared is not used; after the first such round nothing is
    prepared any more.
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
        """Have the batches of a round prepared, after what is known of the one before."""
        if self._engine is None:
            return
        if self._guess is not None and not np.array_equal(self._guess, done.arrived.ids):
            self._engine = None
            return
        pool, _ = pool_of(self._engine, done.pending, done.losses, NOBODY, seed, None)
        if not isinstance(pool.available, AllBut) and len(pool.available) > MANY:
            self._engine = None
            return
        self._guess = np.unique(self._algorithm.selection.choose(done.pending.dispatches, pool, seed))
        self._engine.prepare_round(self._algorithm.client, self._guess, round=round, seed=seed)
