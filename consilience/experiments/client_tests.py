"""Evaluation by the clients themselves: the joint model or their personal models on their own test rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import own_model_of
from consilience.core.evaluate import Evaluate
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.metrics import ClientScores, Metrics, Scores, host
from consilience.core.protocols import RunnerEngine
from consilience.core.tree import Tree
from consilience.experiments.plausibility import plausible

FederatedTest = Callable[[Tree], Scores | None]
"""From a model to its scores over all clients that answered; None if none did."""


def federated_test(engine: RunnerEngine) -> FederatedTest | None:
    """The test by clients on their own rows; None where the server has test rows, or none exist."""
    if engine.test_rows is not None or engine.test_sizes is None:
        return None

    def test(model: Tree) -> Scores | None:
        ids = np.flatnonzero(np.asarray(engine.test_sizes) > 0)
        if not len(ids):
            return None
        said = engine.exchange(Evaluate(), Plain(), Broadcast(shared={"model": model}), ids, round=0, seed=0)
        said = plausible(said, engine.task, np.asarray(engine.test_sizes))
        if not len(said):
            return None
        metrics: Metrics = engine.task.metrics
        (sums,) = host([said.reply])
        rows = sums["loss"]["count"].numpy()
        counted = np.zeros(len(engine.sizes), dtype=np.int64)
        counted[said.ids] = rows
        return Scores(
            rows=int(rows.sum()),
            metrics=metrics.rows,
            values=metrics.values(tree.map_leaves(_added, sums)),
            client_rows=counted,
            clients=client_scores(metrics, said, len(engine.sizes)),
        )

    return test


def _added(leaf: Tensor) -> Tensor:
    return torch.as_tensor(leaf.numpy().sum(0))  # as NumPy adds, whose last bits do not depend on threads


def client_scores(metrics: Metrics, said: Cohort, clients: int) -> ClientScores:
    """What clients that answered said of their own rows, among all [K]."""
    loss, values = (np.full(clients, np.nan) for _ in range(2))
    if len(said):
        (sums,) = host([said.reply])
        loss[said.ids] = metrics.of_clients(sums, "loss")
        values[said.ids] = metrics.of_clients(sums, metrics.main)
    return ClientScores(main=metrics.main_row, loss=loss, values=values, refusals=said.refusals)


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
            unknown = np.full(len(engine.sizes), np.nan)
            return ClientScores(main=metrics.main_row, loss=unknown, values=unknown)
        broadcast = algorithm.server.broadcast(state, ids)
        answer = engine.exchange(Evaluate(rule=own), Plain(), broadcast, ids, round=0, seed=0)
        answer = plausible(answer, engine.task, np.asarray(engine.test_sizes))
        return client_scores(metrics, answer, len(engine.sizes))

    return test


def _sends_personal_models(algorithm: Algorithm, engine: RunnerEngine) -> bool:
    """Whether the server sends each client a model of its own."""
    state = algorithm.server.init(engine.start(), len(engine.sizes))
    return "model" in algorithm.server.broadcast(state, np.arange(1)).personal
