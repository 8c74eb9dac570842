"""A client's memory of its own last model."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from torch.func import vmap

from consilience.client.memory.memory import Memory, TrainingEnd
from consilience.client.memory.models import PreviousModel, distance
from consilience.client.solvers import SGD
from consilience.core.tree import Tree


def model(*values: float) -> Tree:
    return {"params": {"w": torch.tensor(values, dtype=torch.float64)}, "buffers": {"n": torch.tensor(3)}}


def done(after: Tree, sent: Tree, steps: float = 2.0) -> TrainingEnd:
    return TrainingEnd(after, {"model": sent}, {}, torch.tensor(steps, dtype=torch.float64), SGD())


def test_the_first_time_it_is_the_received_model_then_its_own() -> None:
    part = PreviousModel(report=True)
    memory = part.init(model(9.0, 9.0))
    assert not bool(memory["known"]) and isinstance(part, Memory) and part.name == "previous"
    memory, said = part.update(memory, done(model(3.0, 4.0), model(0.0, 0.0)))
    assert said["moved"].item() == 5.0 and bool(memory["known"]) and tiny.same(memory["model"], model(3.0, 4.0))
    memory, said = part.update(memory, done(model(3.0, 16.0), model(100.0, 100.0)))
    assert said["moved"].item() == 12.0 and said["moved"].dtype == torch.float64


def test_a_client_that_did_no_step_keeps_what_it_had() -> None:
    part = PreviousModel(report=True)
    fresh = part.init(model(9.0))
    kept, said = part.update(fresh, done(model(1.0), model(1.0), steps=0))
    assert tiny.same(kept, fresh) and said["moved"].item() == 0.0
    known = {"model": model(7.0), "known": torch.tensor(True)}
    kept, said = part.update(known, done(model(1.0), model(1.0), steps=0))
    assert tiny.same(kept, known) and said["moved"].item() == 6.0


def test_nothing_is_said_unless_asked() -> None:
    part = PreviousModel()
    _, said = part.update(part.init(model(0.0)), done(model(1.0), model(0.0)))
    assert said == {} and part.adds_to_reply == () and PreviousModel(report=True).adds_to_reply == ("moved",)


def test_it_vectorises() -> None:
    part = PreviousModel(report=True)
    old = {"model": {"params": {"w": torch.zeros(2, 1)}, "buffers": {}}, "known": torch.tensor([True, False])}
    after = {"params": {"w": torch.tensor([[3.0], [3.0]])}, "buffers": {}}
    sent = {"params": {"w": torch.tensor([[1.0], [1.0]])}, "buffers": {}}

    def update(old: Tree, after: Tree, sent: Tree) -> tuple[Tree, Tree]:
        return part.update(old, done(after, sent))

    kept, said = vmap(update)(old, after, sent)
    assert said["moved"].tolist() == [3.0, 2.0] and kept["known"].tolist() == [True, True]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e30), (torch.float64, 1e200), (torch.float64, 1e-200)])
def test_row_21_huge_and_tiny_entries(dtype: torch.dtype, size: float) -> None:
    a = {"w": torch.tensor([3 * size], dtype=dtype), "none": torch.zeros(0), "b": torch.tensor(4 * size, dtype=dtype)}
    zero = {name: torch.zeros_like(value) for name, value in a.items()}
    assert distance(a, zero).item() == pytest.approx(5 * size, rel=1e-6)
    assert distance(a, a).item() == 0.0 and math.isfinite(distance(a, zero).item())
