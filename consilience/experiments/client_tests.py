"""Evaluation by clients: the global model or their personal models on their own test rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from consilience.core import rng, tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import own_model_of
from consilience.core.evaluate import VALIDATION, Evaluate
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.federation import Rows
from consilience.core.metrics import Metrics, host
from consilience.core.protocols import RunnerEngine
from consilience.core.tree import Tree
from consilience.experiments.plausibility import plausible
from consilience.task.scores import ClientScores, Scores

FederatedTest = Callable[[Tree], Scores | None]
"""From a model to its scores over all clients that answered; None if none did."""


MANY = 10_000
"""If more clients than this have test rows, a sample of them is tested, unless a number is given."""
SAMPLE = 1_000


def tested_clients(sizes: Any, sample: int | None, seed: int) -> tuple[np.ndarray, int | None]:
    """(ascending ids of the clients to test, the same in every round; the number they are sampled from, or None)."""
    ids = np.flatnonzero(np.asarray(sizes) > 0)
    wanted = sample or (SAMPLE if len(ids) > MANY else len(ids))
    if wanted >= len(ids):
        return ids, None
    return np.sort(rng.host(seed, "tested clients").choice(ids, wanted, replace=False)), len(ids)


def sampled_rows(test: Rows | None, sample: int | None, seed: int) -> tuple[Rows | None, int | None]:
    """(test rows, of a sample of the clients if one is asked for; the number they are sampled from, or None)."""
    if test is None or sample is None:
        return test, None
    ids, total = tested_clients(test.sizes, sample, seed)
    if total is None:
        return test, None
    sizes = torch.zeros_like(test.sizes)
    sizes[torch.from_numpy(ids)] = test.sizes[torch.from_numpy(ids)]
    order = test.owned(torch.from_numpy(ids))
    chosen = replace(
        test,
        x=tree.take(test.x, order.numpy()),
        y=test.y[order.to(test.y.device)],
        starts=torch.cumsum(sizes, 0) - sizes,
        sizes=sizes,
        weight=None,
    )
    return chosen, total


def federated_test(engine: RunnerEngine, *, sample: int | None = None, seed: int = 0) -> FederatedTest | None:
    """The test by clients on their own rows; None where the server has test rows, or none exist.

    sample: how many clients are tested; by default all, of more than `MANY` a sample.
    """
    if engine.test_rows is not None or engine.test_sizes is None:
        return None
    return _by_clients(engine, Evaluate(), lambda: engine.test_sizes, sample, seed)


def federated_validation(engine: RunnerEngine) -> FederatedTest | None:
    """The same on validation rows, which clients of a deployment hold back themselves; None in a simulation."""
    if not isinstance(engine, ValidatesAtClients):
        return None
    return _by_clients(engine, Evaluate(work=VALIDATION), lambda: engine.validation_sizes)


@runtime_checkable
class ValidatesAtClients(Protocol):
    """An engine whose clients have validation rows of their own."""

    @property
    def validation_sizes(self) -> np.ndarray:
        """[K] number of validation rows."""
        ...


def _by_clients(
    engine: RunnerEngine, rule: Evaluate, sizes: Callable[[], Any], sample: int | None = None, seed: int = 0
) -> FederatedTest:
    def test(model: Tree) -> Scores | None:
        held = np.asarray(sizes())
        ids, total = tested_clients(held, sample, seed)
        if not len(ids):
            return None
        said = engine.exchange(rule, Plain(), Broadcast(shared={"model": model}), ids, round=0, seed=0)
        said = plausible(said, engine.task, held)
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
            clients=client_scores(metrics, said, len(engine.sizes), total),
        )

    return test


def _added(leaf: Tensor) -> Tensor:
    return torch.as_tensor(leaf.numpy().sum(0))  # as NumPy adds, whose last bits do not depend on threads


def client_scores(metrics: Metrics, said: Cohort, clients: int, total: int | None = None) -> ClientScores:
    """The scores that the answering clients reported for their own rows, among all [K]."""
    loss, values = (np.full(clients, np.nan) for _ in range(2))
    if len(said):
        (sums,) = host([said.reply])
        loss[said.ids] = metrics.of_clients(sums, "loss")
        values[said.ids] = metrics.of_clients(sums, metrics.main)
    return ClientScores(main=metrics.main_row, loss=loss, values=values, refusals=said.refusals, sampled_from=total)


PersonalTest = Callable[[Tree], ClientScores]
"""From the server's state to the scores; the clients' memories are the engine's."""


def personal_test(
    algorithm: Algorithm, engine: RunnerEngine, *, sample: int | None = None, seed: int = 0
) -> PersonalTest | None:
    """The test of an algorithm with personal models; None for one global model.

    sample: how many clients are tested; by default all, of more than `MANY` a sample.
    """
    own = own_model_of(algorithm.client)
    if engine.test_sizes is None or (own is None and not _sends_personal_models(algorithm, engine)):
        return None

    def test(state: Tree) -> ClientScores:
        ids, total = tested_clients(engine.test_sizes, sample, seed)
        metrics = engine.task.metrics
        if not len(ids):
            unknown = np.full(len(engine.sizes), np.nan)
            return ClientScores(main=metrics.main_row, loss=unknown, values=unknown)
        broadcast = algorithm.server.broadcast(state, ids)
        answer = engine.exchange(Evaluate(rule=own), Plain(), broadcast, ids, round=0, seed=0)
        answer = plausible(answer, engine.task, np.asarray(engine.test_sizes))
        return client_scores(metrics, answer, len(engine.sizes), total)

    return test


def _sends_personal_models(algorithm: Algorithm, engine: RunnerEngine) -> bool:
    """Whether the server sends each client a model of its own."""
    state = algorithm.server.init(engine.start(), len(engine.sizes))
    return "model" in algorithm.server.broadcast(state, np.arange(1)).personal
