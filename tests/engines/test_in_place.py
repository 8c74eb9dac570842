"""A traced step that overwrites its carry gives what the step itself gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from consilience.algorithms.fedavg import fedavg
from consilience.core.rounds import run
from consilience.engines.compiler.in_place import InPlace
from consilience.engines.compiler.trace import trace
from consilience.engines.vectorised import program


def kept_old_value(carry: list[Tensor]) -> list[Tensor]:
    w, _ = carry
    return [torch.add(w, torch.ones_like(w), alpha=-0.5), w]  # a history beside the new parameters


def kept_view_of_old_value(carry: list[Tensor]) -> list[Tensor]:
    w, _ = carry
    return [w + torch.ones_like(w), w.view(2, 2).view(4)]


def adds_another_leaf(carry: list[Tensor]) -> list[Tensor]:
    w, total = carry
    return [w + torch.ones_like(w), total + w]


def changes_a_copy_and_reads_the_original(carry: list[Tensor]) -> list[Tensor]:
    w, total = carry
    copy = w.clone()
    copy.add_(1)
    return [copy, total * w]


def swaps(carry: list[Tensor]) -> list[Tensor]:
    return [carry[1], carry[0]]


@pytest.mark.parametrize(
    "step",
    [kept_old_value, kept_view_of_old_value, adds_another_leaf, changes_a_copy_and_reads_the_original, swaps],
    ids=lambda step: step.__name__,
)
def test_old_values_survive_the_overwriting(step: Callable[[list[Tensor]], list[Tensor]]) -> None:
    carry = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])]
    traced = InPlace(trace(step, carry), len(carry))
    for _ in range(3):
        expected = [leaf.clone() for leaf in step([leaf.clone() for leaf in carry])]
        traced(carry)
        assert all(torch.equal(got, wanted) for got, wanted in zip(carry, expected))


def dense_layer(carry: list[Tensor]) -> list[Tensor]:
    """y = x w^T: the gradient of |y|^2 / 2 is y^T x."""
    w, total = carry
    x = torch.arange(6.0, dtype=w.dtype).view(3, 2)
    y = x @ w.t()
    return [torch.add(w, (y.t() @ x).view(4).view(2, 2), alpha=-0.015625), total + y.sum()]


def read_by_another(carry: list[Tensor]) -> list[Tensor]:
    w, total = carry
    product = torch.ones(2, 3, dtype=w.dtype) @ torch.ones(3, 2, dtype=w.dtype)
    return [w + product, total + product.sum()]


def in_another_order(carry: list[Tensor]) -> list[Tensor]:
    w, total = carry
    return [w + (torch.ones(2, 3, dtype=w.dtype) @ torch.arange(6.0, dtype=w.dtype).view(3, 2)).t(), total]


def of_an_overwritten_factor(carry: list[Tensor]) -> list[Tensor]:
    w, total = carry
    return [w + w.t() @ w, total]


@pytest.mark.parametrize(
    ("step", "products"),
    [(dense_layer, 1), (read_by_another, 0), (in_another_order, 0), (of_an_overwritten_factor, 0)],
)
def test_a_product_is_added_as_it_is_made(step: Callable[[list[Tensor]], list[Tensor]], products: int) -> None:
    carry = [torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)]
    traced = InPlace(trace(step, carry), len(carry), products=True)
    assert len(traced.moves.multiplied) == products
    for _ in range(3):
        expected = [leaf.clone() for leaf in step([leaf.clone() for leaf in carry])]
        traced(carry)
        for got, wanted in zip(carry, expected):
            torch.testing.assert_close(got, wanted, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("lane", "model", "layers"), [("serial", "mlp", 2), ("batched", "mlp", 2)])
@pytest.mark.parametrize("fused", [False, True])
def test_whole_runs_with_products_are_the_same_to_rounding(
    lane: str, model: str, layers: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[InPlace] = []

    def rewritten(*arguments: Any) -> InPlace:
        made.append(InPlace(*arguments, products=True, fused=fused))
        return made[-1]

    algorithm = fedavg(batch_size=4, lr=0.1, epochs=3)
    (*_, plain) = run(algorithm, tiny.engine(tiny.MODELS[model], lane=lane), rounds=2, seed=1)
    monkeypatch.setattr(program, "InPlace", rewritten)
    monkeypatch.setattr(program, "HOT", 0)
    (*_, done) = run(algorithm, tiny.engine(tiny.MODELS[model], lane=lane), rounds=2, seed=1)
    assert made and all(len(step.moves.multiplied) == layers for step in made)
    assert tiny.gap(plain.model, done.model) <= 1e-12


def test_convolutions_as_products_are_added_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[InPlace] = []

    def rewritten(*arguments: Any) -> InPlace:
        made.append(InPlace(*arguments, products=True))
        return made[-1]

    algorithm = fedavg(batch_size=4, lr=0.1)
    (*_, plain) = run(algorithm, tiny.engine(tiny.convnet, lane="batched-matmul"), rounds=2, seed=1)
    monkeypatch.setattr(program, "InPlace", rewritten)
    monkeypatch.setattr(program, "HOT", 0)
    (*_, done) = run(algorithm, tiny.engine(tiny.convnet, lane="batched-matmul"), rounds=2, seed=1)
    assert made and all(len(step.moves.multiplied) == 3 for step in made)
    assert tiny.gap(plain.model, done.model) <= 1e-12


def test_one_object_passed_twice_is_two_inputs() -> None:
    same = torch.tensor(2.0)
    traced = trace(lambda both: [both[0] + 1, both[1] * 10], [same, same])
    assert [float(v) for v in traced([torch.tensor(1.0), torch.tensor(3.0)])] == [2.0, 30.0]
