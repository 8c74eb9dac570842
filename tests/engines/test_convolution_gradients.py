"""Gradients of convolutions whose memory layout the compiler knows: same values, the layout that was promised."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad

from consilience.core.tree import Tree
from consilience.engines.compiler.convolution_gradients import (
    GROUP_NORMS,
    fix_gradient_layouts,
    operation,
    write_channels_last,
)
from consilience.engines.compiler.trace import Trace, trace
from consilience.task.gradients import gradient

aten = torch.ops.aten
FORMATS = [torch.contiguous_format, torch.channels_last]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def traced_gradients(form: torch.memory_format) -> tuple[Trace, list[Tensor], list[Tensor]]:
    """The gradients of two convolutions, of which only the second needs that of its picture; their arguments."""
    pictures = drawn(4, 3, 9, 8, seed=0).contiguous(memory_format=form)
    first, second = (drawn(*shape, seed=1).contiguous(memory_format=form) for shape in ((5, 3, 3, 3), (4, 5, 3, 2)))
    parameters, batch = [first, drawn(5, seed=2), second], [pictures]

    def gradients(parameters: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        def objective(parameters: list[Tensor]) -> Tensor:
            hidden = torch.conv2d(batch[0], *parameters[:2]).tanh()
            return torch.conv2d(hidden, parameters[2], stride=(2, 1), padding=1).square().sum()

        return grad(objective)(parameters)

    return trace(gradients, parameters, batch), parameters, batch


@pytest.mark.parametrize("form", FORMATS)
def test_every_gradient_keeps_its_bits(form: torch.memory_format) -> None:
    traced, *arguments = traced_gradients(form)
    before = traced(*arguments)
    fix_gradient_layouts(traced)
    traced.graph.lint()
    targets = [node.target for node in traced.graph.nodes]
    assert aten.convolution_backward.default not in targets and targets.count(operation()) == 2
    for got, wanted in zip(traced(*arguments), before, strict=True):
        assert torch.equal(got, wanted)


def test_the_gradient_of_a_bias_is_a_sum_that_the_compiler_sees() -> None:
    traced, *_ = traced_gradients(torch.contiguous_format)
    before = sum(node.target is aten.sum.dim_IntList for node in traced.graph.nodes)
    fix_gradient_layouts(traced)
    nodes = list(traced.graph.nodes)
    assert sum(node.target is aten.sum.dim_IntList for node in nodes) == before + 1
    assert not any(node.args[-1][2] for node in nodes if node.target is operation())


@pytest.mark.parametrize("forms", [(one, other) for one in FORMATS for other in FORMATS])
@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False), (True, False, True)])
def test_the_layouts_are_those_that_the_compiler_is_told(
    forms: tuple[torch.memory_format, torch.memory_format], wanted: tuple[bool, bool, bool]
) -> None:
    shapes = ((4, 3, 9, 8), (5, 3, 3, 3))
    picture, weight = (drawn(*shape, seed=0).contiguous(memory_format=form) for shape, form in zip(shapes, forms))
    gradient = drawn(4, 5, 7, 6, seed=1)
    rest = ([5], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, list(wanted))
    arguments = (gradient, picture, weight, *rest)
    torch.library.opcheck(operation(), arguments, test_utils=("test_schema", "test_faketensor"))
    found = operation()(*arguments)
    computed = torch.channels_last if torch.channels_last in forms else torch.contiguous_format
    for value, like, asked in zip(found, (picture, weight), wanted):
        assert value.stride() == (like.contiguous(memory_format=computed).stride() if asked else (1,))


def traced_norms() -> tuple[Trace, list[Tensor], list[Tensor]]:
    """The gradients of two convolutions with a group norm between them; their arguments."""
    parameters = [drawn(*shape, seed=1) for shape in ((4, 3, 3, 3), (4,), (4,), (2, 4, 3, 3))]
    parameters = [p.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p for p in parameters]
    batch = [drawn(4, 3, 9, 8, seed=0).contiguous(memory_format=torch.channels_last)]

    def gradients(parameters: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        def objective(given: Tree) -> tuple[Tensor, None]:
            first, scale, shift, second = given.values()
            hidden = torch.nn.functional.group_norm(torch.conv2d(batch[0], first), 2, scale, shift)
            return torch.conv2d(hidden.relu(), second).square().sum(), None

        with torch.no_grad():  # as in a lane: backpropagation itself is not differentiated
            return list(gradient(objective, dict(enumerate(parameters)))[0].values())  # type: ignore[arg-type]

    return trace(gradients, parameters, batch), parameters, batch


def test_pictures_of_group_norms_are_written_channels_last() -> None:
    traced, *arguments = traced_norms()
    before = traced(*arguments)
    write_channels_last(traced)
    traced.graph.lint()
    copies = [node for node in traced.graph.nodes if node.kwargs.get("memory_format") is torch.channels_last]
    assert [copy.args[0].args[0].target for copy in copies] == list(GROUP_NORMS), "the picture, then its gradient"
    assert all(len(copy.args[0].users) == 1 for copy in copies), "nothing reads the contiguous picture"
    for got, wanted in zip(traced(*arguments), before, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler")
@pytest.mark.parametrize("made", [*(functools.partial(traced_gradients, form) for form in FORMATS), traced_norms])
def test_the_compiled_step_is_the_traced_one(made: Callable[[], tuple[Trace, list[Tensor], list[Tensor]]]) -> None:
    traced, parameters, batch = made()
    before = traced(parameters, batch)
    write_channels_last(traced)
    fix_gradient_layouts(traced)
    for got, wanted in zip(torch.compile(traced.module, dynamic=False)(*parameters, *batch), before, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_step_without_convolutions_stays_as_it_is() -> None:
    traced = trace(lambda values, _: [values[0] * 2], [drawn(3, seed=0)], [drawn(3, seed=0)])
    module = traced.module
    fix_gradient_layouts(traced)
    assert traced.module is module
