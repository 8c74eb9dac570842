"""How good each client's own model is, on its own test rows: clients test it themselves, in an exchange."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import own_model_of
from consilience.core.evaluate import Evaluate
from consilience.core.metrics import ClientScores
from consilience.core.protocols import RunnerEngine
from consilience.core.tree import Tree
from consilience.experiments.federated_test import client_scores

PersonalTest = Callable[[Tree], ClientScores]
"""From the server's state to the scores; the clients' memories are the engine's."""


def personal_test(algorithm: Algorithm, engine: RunnerEngine) -> PersonalTest | None:
    """The test of an algorithm whose clients have models of their own; None for one global model."""
    own = own_model_of(algorithm.client)
    if engine.test_sizes is None or (own is None and not _sends_personal_models(algorithm, engine)):
        return None

    def test(state: Tree) -> ClientScores:
        ids = np.flatnonzero(np.asarray(engine.test_sizes) > 0)
        metrics = engine.task.metrics
        if not len(ids):
            nobody = np.full(len(engine.sizes), np.nan)
            return ClientScores(main=metrics.main_row, loss=nobody, values=nobody)
        broadcast = algorithm.server.broadcast(state, ids)
        answer = engine.exchange(Evaluate(rule=own), Plain(), broadcast, ids, round=0, seed=0)
        return client_scores(metrics, answer, len(engine.sizes))

    return test


def _sends_personal_models(algorithm: Algorithm, engine: RunnerEngine) -> bool:
    """Whether the server sends each client a model of its own."""
    state = algorithm.server.init(engine.start(), len(engine.sizes))
    return "model" in algorithm.server.broadcast(state, np.arange(1)).personal
