"""The next round's batches, prepared while a device is still busy with this round's."""

from __future__ import annotations

from typing import Any

import numpy as np

from consilience.core.algorithm import Algorithm
from consilience.core.arrivals import Pace, Replies
from consilience.core.capabilities import DrawsSecretly, QueriesBeforeSelection, capability
from consilience.core.client_flags import AllBut
from consilience.core.exchange import Pool, Presence
from consilience.core.protocols import Engine, NamesEmptyClients, PreparesAhead

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
        able = isinstance(engine, PreparesAhead) and engine.prepares_ahead
        self._engine: Any = engine if able and not secret and not queries and pace.buffer is None else None
        self._algorithm = algorithm
        self._guess: np.ndarray | None = None

    def prepare(self, done: Replies, round: int, seed: int) -> None:
        """Have the batches of a round prepared, after what is known of the one before."""
        if self._engine is None:
            return
        if self._guess is not None and not np.array_equal(self._guess, done.chosen):
            self._engine = None
            return
        engine, turn = self._engine, done.pending.dispatches
        available = engine.available(turn, seed)
        if not isinstance(available, AllBut) and len(available) > MANY:
            self._engine = None
            return
        pool = Pool(
            sizes=engine.sizes,
            losses=done.losses,  # type: ignore[arg-type]
            available=available,
            presence=Presence(done.pending.absent, turn + 1),
            seconds=done.pending.took,  # type: ignore[arg-type]
            empty=engine.empty if isinstance(engine, NamesEmptyClients) else None,
        )
        self._guess = np.unique(self._algorithm.selection.choose(turn, pool, seed))
        engine.prepare_round(self._algorithm.client, self._guess, round=round, seed=seed)
