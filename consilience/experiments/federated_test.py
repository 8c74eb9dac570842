"""How good the global model is where the server has no test rows: clients test it on their own, in an exchange."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from consilience.core import tree
from consilience.core.algorithm import Plain
from consilience.core.evaluate import Evaluate
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.metrics import ClientScores, Metrics, Scores, host
from consilience.core.protocols import RunnerEngine
from consilience.core.tree import Tree

FederatedTest = Callable[[Tree], Scores | None]
"""From a model to its scores over all clients that answered; None if nobody did."""


def federated_test(engine: RunnerEngine) -> FederatedTest | None:
    """The test by clients on their own rows; None where the server has test rows, or nobody has."""
    if engine.test_rows is not None or engine.test_sizes is None:
        return None

    def test(model: Tree) -> Scores | None:
        ids = np.flatnonzero(np.asarray(engine.test_sizes) > 0)
        if not len(ids):
            return None
        said = engine.exchange(Evaluate(), Plain(), Broadcast(shared={"model": model}), ids, round=0, seed=0)
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
    return ClientScores(main=metrics.main_row, loss=loss, values=values)
