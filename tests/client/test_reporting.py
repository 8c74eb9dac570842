"""What DR-FedAvg's and FedFa's clients say besides their models."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F

import consilience as cs
from consilience.environments.environment import Environment

pytestmark = pytest.mark.usefixtures("untraced")


@pytest.mark.parametrize("lane", ["serial", "batched"])
@pytest.mark.parametrize("epochs", [1, 3, 0.5])
def test_start_loss_is_the_mean_loss_of_the_received_model(lane: str, epochs: float) -> None:
    silent = Environment(communication=(1.0, 1.0, 0.0, 1.0, 1.0), silent="broadcast_model")
    engine = tiny.engine(tiny.convnet, lane=lane, environment=silent)
    model = engine.start()
    for done in cs.run(cs.dr_fedavg(q=1.0, lr=0.05, batch_size=4, epochs=epochs), engine, rounds=2, seed=1):
        expected = []
        for k in range(5):
            x, y = engine.store("train").of(k)
            expected.append(float(F.cross_entropy(engine.task.apply(model, x, train=False)[0], y)))
        np.testing.assert_allclose(done.cohort.reply["start_loss"], expected, rtol=1e-12)
        literal = np.array(tiny.SIZES) * np.array(expected) ** 2
        np.testing.assert_allclose(done.notes["weights"], literal / literal.sum(), rtol=1e-10)
        model = done.model


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_accuracy_is_that_of_the_trained_model_on_the_clients_rows(lane: str) -> None:
    engine = tiny.engine(tiny.mlp, lane=lane)
    for done in cs.run(cs.fedfa(lr=0.05, batch_size=4, epochs=2), engine, rounds=2, seed=1):
        expected = []
        for k in range(5):
            own = {"params": {n: v[k] for n, v in done.cohort.reply["model"]["params"].items()}, "buffers": {}}
            x, y = engine.store("train").of(k)
            expected.append(float((engine.task.apply(own, x, train=False)[0].argmax(1) == y).double().mean()))
        assert done.notes["accuracy"].tolist() == pytest.approx(expected, abs=1e-12)
        assert done.bytes_up == sum(leaf.numel() * leaf.element_size() for leaf in _leaves(done.cohort.reply))


def test_training_itself_is_untouched() -> None:
    """The same local models as FedAvg's in the first round."""
    replies = []
    for recipe in (cs.fedavg, cs.dr_fedavg, cs.fedfa):
        (done,) = cs.run(recipe(lr=0.05, batch_size=4), tiny.engine(tiny.convnet), rounds=1, seed=1)
        replies.append({name: done.cohort.reply[name] for name in ("model", "loss")})
    assert tiny.same(replies[0], replies[1]) and tiny.same(replies[0], replies[2])


def _leaves(value: dict) -> list[torch.Tensor]:
    return [leaf for part in value.values() for leaf in (_leaves(part) if isinstance(part, dict) else [part])]
