"""How good the global model is where the server has no test rows: clients test it on their own, in an exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from consilience.core.algorithm import Plain
from consilience.core.evaluate import Evaluate
from consilience.core.exchange import Broadcast
from consilience.core.tree import Tree
from consilience.experiments.evaluation import Scores

FederatedTest = Callable[[Tree], Scores | None]
"""From a model to its scores over all clients that answered; None if nobody did."""


def test_rows(engine: Any) -> np.ndarray | None:
    """[K] test rows of every client; None where there are no test rows."""
    if hasattr(engine, "test_sizes"):  # an engine whose clients' rows are elsewhere
        return engine.test_sizes
    return engine.store("test").sizes.numpy() if engine.federation.test is not None else None


def federated_test(engine: Any, classes: int) -> FederatedTest | None:
    """The test by clients whose rows are elsewhere; None for an engine that has the rows itself."""
    if not hasattr(engine, "test_sizes"):
        return None

    def test(model: Tree) -> Scores | None:
        ids = np.flatnonzero(engine.test_sizes > 0)
        if not len(ids):
            return None
        said = engine.exchange(Evaluate(), Plain(), Broadcast(shared={"model": model}), ids, round=0, seed=0)
        if not len(said):
            return None
        loss, correct, rows = (said.reply[key].cpu().numpy() for key in ("loss", "correct", "rows"))
        each = {key: np.full(len(engine.sizes), np.nan) for key in ("loss", "accuracy")}
        each["loss"][said.ids] = loss / rows
        if classes:
            each["accuracy"][said.ids] = correct / rows
        counted = np.zeros(len(engine.sizes), dtype=np.int64)
        counted[said.ids] = rows
        return Scores(
            rows=int(rows.sum()),
            loss=float(loss.sum() / rows.sum()),
            accuracy=float(correct.sum() / rows.sum()) if classes else None,
            client_rows=counted,
            client_loss=each["loss"],
            client_accuracy=each["accuracy"],
        )

    return test
