"""How good the global model is where the server has no test rows: clients test it on their own, in an exchange."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from consilience.core.algorithm import Plain
from consilience.core.evaluate import Evaluate
from consilience.core.exchange import Broadcast
from consilience.core.protocols import RunnerEngine
from consilience.core.tree import Tree
from consilience.experiments.evaluation import Scores

FederatedTest = Callable[[Tree], Scores | None]
"""From a model to its scores over all clients that answered; None if nobody did."""


def federated_test(engine: RunnerEngine, classes: int) -> FederatedTest | None:
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
