"""Like operations joined into list operations give the same values, in far fewer operations."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.fedprox import fedprox
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.engines.compiler import in_place
from consilience.engines.compiler.fuse import fuse
from consilience.engines.compiler.trace import Trace, trace
from consilience.engines.vectorised import program
from consilience.engines.vectorised.engine import Vectorised
from consilience.models import build
from consilience.task.task import Task

aten = torch.ops.aten


def operations(traced: Trace) -> list[Any]:
    """What the graph computes, without the reading of parts."""
    return [n.target for n in traced.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


def fused(function: Callable[..., list[Tensor]], *inputs: list[Tensor]) -> Trace:
    """The function's trace, joined, after a look at whether it computes what the function does."""
    traced = trace(function, *inputs)
    fuse(traced.graph)
    traced.graph.lint()
    traced.rewritten()
    for got, wanted in zip(traced(*inputs), function(*inputs), strict=True):
        assert got.dtype == wanted.dtype and got.stride() == wanted.stride() and torch.equal(got, wanted)
    return traced


def some(count: int = 5, *, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(2, size + 1, generator=draw) for size in range(count)]


def test_a_chain_over_five_tensors_is_one_operation_a_link() -> None:
    def step(w: list[Tensor], g: list[Tensor]) -> list[Tensor]:
        return [a - 0.1 * torch.add(b, a, alpha=0.5) / b.abs().sqrt() for a, b in zip(w, g)]

    found = operations(fused(step, some(), some(seed=1)))
    assert [op for op in found if op not in (aten.abs.default,)] == [
        aten._foreach_add.List,  # on inputs alone: before everything else
        aten._foreach_mul.Scalar,
        aten._foreach_sqrt.default,
        aten._foreach_div.List,
        aten._foreach_sub.List,
    ]


def test_a_number_held_by_a_tensor_serves_the_whole_list() -> None:
    def step(w: list[Tensor], rate: list[Tensor]) -> list[Tensor]:
        total = torch.stack([leaf.sum() for leaf in w]).sum()  # in the way, so that nothing goes to the front
        number = total * rate[0]
        return [leaf * number.expand(leaf.shape) / total for leaf in w]

    found = operations(fused(step, some(), [torch.tensor(0.25)]))
    assert found.count(aten._foreach_mul.Tensor) == 1 and found.count(aten._foreach_div.Tensor) == 1


def test_a_number_on_the_left_or_of_another_type_stays_where_it_is() -> None:
    def step(w: list[Tensor]) -> list[Tensor]:
        total = torch.stack([leaf.sum() for leaf in w]).sum()
        return [*(total / leaf for leaf in w), *(leaf * total.double() for leaf in w)]

    assert not [op for op in operations(fused(step, some())) if "foreach" in str(op)]


def test_statistics_are_read_before_and_after_a_batch_norm_changes_them() -> None:
    def step(w: list[Tensor], mean: list[Tensor], variance: list[Tensor]) -> list[Tensor]:
        mean, variance = [m.clone() for m in mean], [v.clone() for v in variance]
        before = [m * 2 for m in mean]
        out = [torch.native_batch_norm(x, None, None, m, v, True, 0.1, 1e-5)[0] for x, m, v in zip(w, mean, variance)]
        return [*before, *out, *(m * 2 for m in mean)]

    sizes = [leaf.shape[1] for leaf in some()]
    found = operations(fused(step, some(), [torch.zeros(n) for n in sizes], [torch.ones(n) for n in sizes]))
    assert found.count(aten.mul.Tensor) == 10 and aten._foreach_mul.Scalar not in found


def test_casts_are_joined_by_their_types() -> None:
    def step(w: list[Tensor]) -> list[Tensor]:
        low = [leaf.to(torch.bfloat16) for leaf in w]
        return [leaf.exp().to(torch.float32) for leaf in low]

    found = operations(fused(step, some()))
    assert found.count(aten._foreach_copy_.default) == 2 and aten._to_copy.default not in found


def test_different_tensors_and_short_lists_stay_as_they_are() -> None:
    def step(w: list[Tensor]) -> list[Tensor]:
        wide = [leaf + torch.ones(1) for leaf in w]  # broadcast
        turned = [leaf + leaf.t().contiguous().t() for leaf in w]  # another layout
        return [*wide, *turned, *(leaf * 3 for leaf in w[:2])]

    assert not [op for op in operations(fused(step, some())) if "foreach" in str(op)]


def test_what_is_overwritten_is_read_in_its_turn() -> None:
    def step(w: list[Tensor]) -> list[Tensor]:
        early = [leaf * 2 for leaf in w]
        copies = [leaf.clone() for leaf in w]
        for copy in copies:
            copy.add_(1)  # between the two products of the same copy
        between = [copy * 2 for copy in copies]
        for copy in copies:
            copy.view(-1).mul_(3)
        return [*early, *between, *(copy * 2 for copy in copies)]

    found = operations(fused(step, some()))
    assert found.count(aten._foreach_mul.Scalar) == 1  # the early ones
    assert found.count(aten.mul.Tensor) == 10


def test_one_result_may_feed_others() -> None:
    def step(w: list[Tensor], g: list[Tensor]) -> list[Tensor]:
        sums = [a + b for a, b in zip(w, g)]
        return [*sums, *(a * b for a, b in zip(sums, w)), sum((leaf.sum() for leaf in sums), torch.zeros(()))]

    fused(step, some(), some(seed=1))


def test_the_value_of_a_penalty_is_not_computed_where_only_its_gradient_counts() -> None:
    """FedProx's step on a ResNet-18: beside the network's own operations only a handful."""
    counts = {}
    for name, algorithm in {"plain": fedavg(), "prox": fedprox(mu=0.1), "adam": fedavg(optimiser="adam")}.items():
        counts[name] = _operations_of_a_step(algorithm)
    assert counts["prox"] <= counts["plain"] + 8
    assert counts["adam"] <= counts["plain"] + 30  # with numbers for the bias correction


def _operations_of_a_step(algorithm: Any) -> int:
    made: list[Trace] = []

    class Kept(in_place.InPlace):
        def __init__(self, traced: Trace, leaves: int, **options: Any) -> None:
            super().__init__(traced, leaves, fused=True, **options)
            made.append(traced)

    federation = Federation.from_clients([(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))] * 2, classes=10)
    task = Task(build("resnet18", inputs=(3, 32, 32), classes=10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "InPlace", Kept)
        patch.setattr(program, "HOT", 0)
        engine = Vectorised(task, federation, device="cpu", lane="serial", precision="bf16")
        next(iter(run(algorithm, engine, rounds=1)))
    return len([op for op in operations(made[0]) if op is not aten.empty_like.default])
