"""Convolution as unfold + matrix product, against PyTorch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from consilience.layers.exact import MatmulConv2d, use_matmul


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 1, "bias": False},
        {"kernel_size": (2, 3), "stride": (2, 1), "padding": (0, 2)},
        {"kernel_size": 3, "stride": 2, "padding": 3, "dilation": 2},
        {"kernel_size": (7, 3), "stride": (7, 3)},
        {"kernel_size": 3, "stride": 3},
    ],
    ids=str,
)
def test_output_and_gradients(options: dict[str, Any]) -> None:
    layer = nn.Conv2d(3, 4, dtype=torch.float64, **options)
    other = MatmulConv2d(copy.deepcopy(layer))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 7, 9, generator=draw, dtype=torch.float64)
    results = []
    for module in (layer, other):
        given = x.clone().requires_grad_()
        out = module(given)
        out.square().sum().backward()
        results.append([out, given.grad, *(p.grad for p in module.parameters())])
    for expected, got in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_names_and_values_are_kept() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.Conv2d(2, 2, 1, bias=False)))
    names = {name: value.clone() for name, value in module.state_dict().items()}
    swapped = use_matmul(module)
    assert [type(part) for part in (swapped[0], swapped[1][0])] == [MatmulConv2d, MatmulConv2d]
    assert list(swapped.state_dict()) == list(names)
    assert all(torch.equal(names[name], value) for name, value in swapped.state_dict().items())


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv1d(4, 4, 3),
    ],
    ids=["groups", "same", "circular", "1d"],
)
def test_other_convolutions_stay_as_they_are(layer: nn.Module) -> None:
    assert use_matmul(nn.Sequential(layer))[0] is layer
