"""A traced step that overwrites its carry gives what the step itself gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from consilience.engines.in_place import InPlace
from consilience.engines.tracing import trace


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


def test_one_object_passed_twice_is_two_inputs() -> None:
    same = torch.tensor(2.0)
    traced = trace(lambda both: [both[0] + 1, both[1] * 10], [same, same])
    assert [float(v) for v in traced([torch.tensor(1.0), torch.tensor(3.0)])] == [2.0, 30.0]
