"""The weight gradient of a first convolution as matrix products: same values, same order in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad

from consilience.engines.compiler.thin_convolutions import multiply_thin_gradients
from consilience.engines.compiler.trace import trace

aten = torch.ops.aten


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding"),
    [
        (3, (3, 3), (1, 1), (0, 0)),
        (3, (3, 2), (2, 1), (1, 2)),
        (1, (5, 5), (1, 1), (2, 2)),
        (2, (1, 1), (3, 2), (0, 0)),
    ],
)
def test_the_gradient_is_autograds(
    channels: int, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], channels_last: bool
) -> None:
    pictures, weight, bias = drawn(4, channels, 9, 8, seed=0), drawn(5, channels, *kernel, seed=1), drawn(5, seed=2)
    form = torch.channels_last if channels_last else torch.contiguous_format
    pictures, weight = pictures.contiguous(memory_format=form), weight.contiguous(memory_format=form)

    def gradients(parameters: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        def objective(parameters: list[Tensor]) -> Tensor:
            return torch.conv2d(batch[0], *parameters, stride, padding).tanh().square().sum()

        return grad(objective)(parameters)

    traced = trace(gradients, [weight, bias], [pictures])
    before = traced([weight, bias], [pictures])
    multiply_thin_gradients(traced)
    traced.graph.lint()
    after = traced([weight, bias], [pictures])
    assert aten.convolution_backward.default not in {node.target for node in traced.graph.nodes}
    for got, wanted in zip(after, before, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, check_stride=max(kernel) > 1)
    other = [drawn(*pictures.shape, seed=3).contiguous(memory_format=form)]
    for got, wanted in zip(traced([weight, bias], other), gradients([weight, bias], other), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["wide", "later", "grouped", "dilated", "transposed", "1d", "short"])
def test_others_stay_as_they_are(how: str) -> None:
    shapes = {
        "wide": ((2, 8, 7, 7), (4, 8, 3, 3)),
        "grouped": ((2, 4, 7, 7), (4, 2, 3, 3)),
        "1d": ((2, 3, 9), (4, 3, 3)),
    }
    x, w = shapes.get(how, ((2, 3, 7, 7), (3, 3, 3, 3)))

    def objective(w: Tensor, x: Tensor) -> Tensor:
        if how == "1d":
            return torch.conv1d(x, w).square().sum()
        if how == "transposed":
            return torch.conv_transpose2d(x, w).square().sum()
        options = {"groups": 2} if how == "grouped" else {"dilation": 2} if how == "dilated" else {}
        return torch.conv2d(x, w, **options).square().sum()  # type: ignore[call-overload]

    wanted = (0, 1) if how == "later" else 0
    dtype = torch.bfloat16 if how == "short" else torch.float64
    inputs = [drawn(*w, seed=0).to(dtype)], [drawn(*x, seed=1).to(dtype)]

    def gradients(w: list[Tensor], x: list[Tensor]) -> list[Tensor]:
        found = grad(objective, wanted)(w[0], x[0])
        return list(found) if isinstance(found, tuple) else [found]

    traced = trace(gradients, *inputs)
    before = [node.target for node in traced.graph.nodes]
    multiply_thin_gradients(traced)
    assert [node.target for node in traced.graph.nodes] == before
    assert aten.convolution_backward.default in before
