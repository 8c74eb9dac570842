"""A replayed trace gives what the function gives, to the last bit, for new values of the same shapes."""

from __future__ import annotations

import ast
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from consilience.engines.compiler.trace import Flat, trace

TABLE = torch.arange(12.0).reshape(3, 4)


def derivative(x: Tensor, y: Tensor) -> Tensor:
    return vmap(grad(lambda a, b: ((a * b).sum() ** 2).sin()))(x, y)


def normalised(x: Tensor, y: Tensor) -> Tensor:
    mean, var = torch.zeros(4), torch.ones(4)
    out = torch.nn.functional.batch_norm(x, mean, var, training=True)
    return out + mean * var + y


def several_values(x: Tensor, y: Tensor) -> Tensor:
    largest, where = x.max(1)
    return largest.unsqueeze(1) + y + where.unsqueeze(1)


def changes_a_copy(x: Tensor, y: Tensor) -> Tensor:
    copy = x.clone()
    copy.add_(y).mul_(2)
    return copy + x


def reads_a_constant(x: Tensor, y: Tensor) -> Tensor:
    return x + TABLE * torch.tensor(3.0) - y.detach().t().t()


def takes_lists(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y], 1)[:, [0, 5, 2]].to(torch.float64)


def casts_a_counter_twice(x: Tensor, y: Tensor) -> Tensor:
    count = x.sum()  # one number, cast before and after it changes
    before = count.to(torch.float64)
    count.view(1).add_(1)  # by another name
    return before * 1000 + count.to(torch.float64) + y


def first_power_of_what_changes(x: Tensor, y: Tensor) -> Tensor:
    copy = x.clone()
    same = copy**1
    copy.add_(y)
    return same * copy


def first_power_of_whole_numbers(x: Tensor, y: Tensor) -> Tensor:
    return x.argmax(1) ** 1.0 / 2 + y.sum()


FUNCTIONS = [
    derivative,
    normalised,
    several_values,
    changes_a_copy,
    reads_a_constant,
    takes_lists,
    casts_a_counter_twice,
    first_power_of_what_changes,
    first_power_of_whole_numbers,
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_replay_equals_the_function(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    first, second = [torch.randn(3, 4) for _ in range(2)], [torch.randn(3, 4) for _ in range(2)]
    traced = trace(lambda a, b: [function(a[0], b[0]), a[0]], [first[0]], [first[1], None])
    for x, y in (first, second):
        before = x.clone()
        value, same = traced([x], [y, None])
        wanted = function(x, y)
        assert value.dtype == wanted.dtype and torch.equal(value, wanted) and same is x
        assert torch.equal(x, before)


def test_one_object_passed_twice_is_two_inputs() -> None:
    x = torch.ones(2)
    traced = trace(lambda a: [a[0] * a[1]], [x, x])
    assert traced([torch.full((2,), 2.0), torch.full((2,), 5.0)])[0].tolist() == [10.0, 10.0]


def test_what_nobody_reads_is_not_computed_and_values_are_dropped_after_their_last_use() -> None:
    traced = trace(lambda a: [a[0] + 1 if (a[0].exp() * 2).numel() else a[0]], [torch.ones(2)])
    names = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert names == ["aten.add.Tensor"]


def test_reading_a_value_in_python_is_refused() -> None:
    with pytest.raises(TypeError, match="a value was read out of a tensor"):
        trace(lambda a: [a[0] * float(a[0].sum())], [torch.ones(2)])


@pytest.mark.parametrize(
    ("lane", "needed"),
    [("serial", []), ("streams", []), ("batched", ["sympy"])],  # the cross-entropy under vmap imports sympy
)
def test_training_imports_no_compiler_and_nothing_else_that_it_does_not_need(lane: str, needed: list[str]) -> None:
    """A second of start-up: `torch.func.grad` and `make_fx` import the compiler, the gradient here does not."""
    code = f"""
import sys, torch
from consilience.algorithms.fedavg import fedavg
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.task.task import Task
from consilience.engines.vectorised import program
from consilience.engines.vectorised.engine import Vectorised
program.HOT = 0
clients = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(3)]
engine = Vectorised(Task(torch.nn.Linear(3, 2)), Federation.from_clients(clients), lane="{lane}", device="cpu")
list(run(fedavg(batch_size=4), engine, rounds=3))
(made,) = engine._programs.values()
assert made.one.traced or made.group.traced
heavy = "torch._dynamo", "torch._inductor", "sympy", "networkx", "scipy", "sklearn", "pandas", "flwr", "ray"
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(ast.literal_eval(done.stdout)) <= set(needed)


def test_operations_that_give_no_tensor_are_recorded() -> None:
    """A flag or a number depends on shapes alone: cuDNN's recurrent layers and some sums ask for such values."""

    def function(flat: Flat) -> Flat:
        same = torch.ops.aten.is_same_size.default(flat[0], flat[1])
        return [flat[0] * (2.0 if same else 3.0) + flat[1]]

    inputs = [torch.arange(3.0), torch.ones(3)]
    traced = trace(function, inputs)
    assert torch.equal(traced(inputs)[0], function(inputs)[0])
    assert torch.equal(traced([torch.ones(3), torch.ones(3)])[0], torch.full((3,), 3.0))


def test_what_is_not_needed_is_freed_while_recording() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def chain(values: Flat) -> Flat:
        nonlocal most
        value = values[0]
        for _ in range(20):
            value = value.sin()
            alive.append(weakref.ref(value))
            most = max(most, sum(one() is not None for one in alive))
        return [value]

    x = torch.randn(5)
    traced = trace(chain, [x])
    assert most <= 3  # not all twenty
    assert torch.equal(traced([x])[0], chain([x])[0])


def test_equal_casts_are_made_once() -> None:
    def layers(values: Flat) -> Flat:
        x, *weights = values
        return [x.to(torch.bfloat16) @ weight.to(torch.bfloat16) for weight in weights]

    values = [torch.randn(3, 4), *(torch.randn(4, 4) for _ in range(3))]
    traced = trace(layers, values)
    casts = [node for node in traced.graph.nodes if node.target == torch.ops.aten._to_copy.default]
    assert len(casts) == 4  # x once, each weight once
    assert all(torch.equal(a, b) for a, b in zip(traced(values), layers(values)))


def test_a_list_within_a_tuple_is_computed_anew_in_every_replay() -> None:
    """The gradient of cuDNN's recurrent layers gives the weights' gradients as such a list."""
    library = torch.library.Library("consilience_tests", "FRAGMENT")
    library.define("nested(Tensor x) -> (Tensor, Tensor[])")
    library.impl("nested", lambda x: (x + 1, [x * 2, x * 3]), "CPU")

    def step(a: list[torch.Tensor]) -> list[torch.Tensor]:
        first, (double, triple) = torch.ops.consilience_tests.nested(a[0])
        return [first, double + triple]

    traced = trace(step, [torch.ones(2)])
    assert [value.tolist() for value in traced([torch.full((2,), 10.0)])] == [[11.0, 11.0], [50.0, 50.0]]
