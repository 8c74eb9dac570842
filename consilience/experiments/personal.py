"""How good each client's own model is, on its own test rows: clients test it themselves, in an exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import own_model_of
from consilience.core.evaluate import Evaluate
from consilience.core.protocols import RunnerEngine
from consilience.core.tree import Tree
from consilience.experiments.evaluation import fairness


class PersonalScores(NamedTuple):
    """[K] of every client's own model on its own test rows; NaN where a client has none."""

    loss: np.ndarray
    accuracy: np.ndarray

    def row(self, classes: int) -> dict[str, Any]:
        """What is recorded: mean loss; mean, worst tenth and spread of the accuracies."""
        known = self.loss[np.isfinite(self.loss)]
        row: dict[str, Any] = {"personal_loss": float(known.mean()) if len(known) else None}
        spread = fairness(self.accuracy) if classes else {}
        return row | {f"personal_accuracy_{name}": value for name, value in spread.items()}


UNTESTED = PersonalScores(np.empty(0), np.empty(0))
PersonalTest = Callable[[Tree], PersonalScores]
"""From the server's state to the scores; the clients' memories are the engine's."""


def personal_test(algorithm: Algorithm, engine: RunnerEngine) -> PersonalTest | None:
    """The test of an algorithm whose clients have models of their own; None for one global model."""
    own = own_model_of(algorithm.client)
    if engine.test_sizes is None or (own is None and not _sends_personal_models(algorithm, engine)):
        return None

    def test(state: Tree) -> PersonalScores:
        ids = np.flatnonzero(np.asarray(engine.test_sizes) > 0)
        loss, accuracy = (np.full(len(engine.sizes), np.nan) for _ in range(2))
        if len(ids):
            broadcast = algorithm.server.broadcast(state, ids)
            answer = engine.exchange(Evaluate(rule=own), Plain(), broadcast, ids, round=0, seed=0)
            said = answer.reply if len(answer) else {key: torch.empty(0) for key in ("loss", "correct", "rows")}
            loss[answer.ids] = (said["loss"] / said["rows"]).cpu().numpy()
            if engine.task.decides:
                accuracy[answer.ids] = (said["correct"] / said["rows"]).cpu().numpy()
        return PersonalScores(loss, accuracy)

    return test


def _sends_personal_models(algorithm: Algorithm, engine: RunnerEngine) -> bool:
    """Whether the server sends each client a model of its own."""
    state = algorithm.server.init(engine.start(), len(engine.sizes))
    return "model" in algorithm.server.broadcast(state, np.arange(1)).personal
