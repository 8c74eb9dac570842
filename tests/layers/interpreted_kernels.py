"""The Triton kernels on a processor, by Triton's interpreter; `test_kernels.py` runs this file in a process for it.

On a GPU, tests/engines/test_cuda_lanes.py runs them compiled. The interpreter does not multiply bfloat16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from consilience.engines.compiler import rectified_convolutions
from consilience.engines.compiler.trace import Trace, trace
from consilience.layers import attention, client_convolutions, convolution_kernels, exact, grouped

aten = torch.ops.aten
CLIENTS, PICTURES = 3, 2
# channels, outputs, picture, kernel, stride, padding, dilation
GEOMETRIES = [
    (3, 8, (9, 8), (3, 3), (1, 1), (0, 0), (1, 1)),
    (32, 16, (8, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    (5, 24, (9, 10), (3, 2), (2, 1), (1, 0), (1, 2)),
    (16, 20, (8, 8), (1, 1), (2, 2), (0, 0), (1, 1)),
    (64, 70, (5, 5), (3, 3), (2, 2), (1, 1), (1, 1)),
    (2, 4, (12, 12), (3, 3), (1, 1), (1, 1), (1, 1)),  # enough pixels for sums in several parts
]


@pytest.fixture(autouse=True)
def without_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_kernels, "SPLIT", False)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gap(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("case", GEOMETRIES, ids=str)
def test_a_convolution_and_its_gradients_are_those_of_torch(case: Any, last: bool) -> None:
    channels, outputs, size, kernel, *geometry = case
    x = drawn(CLIENTS, PICTURES, channels, *size, seed=0).requires_grad_()
    weight = drawn(CLIENTS, outputs, channels, *kernel, seed=1).requires_grad_()
    bias = drawn(CLIENTS, outputs, seed=2).requires_grad_()
    wanted = torch.stack([F.conv2d(x[k], weight[k], bias[k], *geometry) for k in range(CLIENTS)])
    above = drawn(*wanted.shape, seed=3)
    gradients = torch.autograd.grad(wanted, (x, weight, bias), above)
    if last:
        x, above = (part.detach().permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) for part in (x, above))
    call = client_convolutions._Call(*geometry)
    with torch.no_grad():
        assert gap(call.forward(CLIENTS, x, weight, bias), wanted) < 1e-5
        for got, expected in zip(call.backward(above), gradients, strict=True):
            assert got is not None and gap(got, expected) < 1e-5


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("convolve", lambda x, w, above: (x, w.permute(0, 1, 3, 4, 2).contiguous(), None)),
        ("convolution_input_gradient", lambda x, w, above: (above, w.permute(0, 2, 3, 4, 1).contiguous(), [6, 7])),
        ("convolution_weight_gradient", lambda x, w, above: (above, x, [3, 2])),
        ("convolve_and_pool", lambda x, w, above: (x, w.permute(0, 1, 3, 4, 2).contiguous(), None)),
    ],
)
def test_the_compiler_is_told_the_layout_that_comes(operation: str, arguments: Any) -> None:
    x, weight, above = drawn(2, 2, 3, 6, 7, seed=0), drawn(2, 4, 3, 3, 2, seed=1), drawn(2, 2, 4, 3, 8, seed=2)
    given = (*arguments(x, weight, above), [2, 1], [1, 1], [1, 1])
    torch.library.opcheck(
        getattr(torch.ops.consilience, operation), given, test_utils=("test_schema", "test_faketensor")
    )


def test_a_group_of_clients_is_trained_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under vmap and grad, as the lane does it; the first layer's gradient by the pictures is dropped from a trace."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    params = {
        n: torch.stack([p.detach() + 0.1 * drawn(*p.shape, seed=k) for k in range(3)])
        for n, p in net.named_parameters()
    }
    x, y = drawn(3, 5, 3, 8, 8, seed=9), torch.arange(15).reshape(3, 5) % 4

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, params, (x,)), y)

    wanted = vmap(grad(loss))(params, x, y)
    net = exact.use_matmul(net)
    monkeypatch.setattr(client_convolutions, "usable", lambda x, weight: grouped.grouped())
    monkeypatch.setattr(exact, "_on_gpu", lambda x: True)
    got = vmap(grad(loss))(params, x, y)
    assert all(gap(got[name], wanted[name]) < 1e-5 for name in wanted)
    traced = trace(
        lambda leaves, batch: list(vmap(grad(loss))(dict(zip(params, leaves)), *batch).values()),
        list(params.values()),
        [x, y],
    )
    assert _kernels_of(traced) == [
        "convolution_input_gradient",
        "convolution_weight_gradient",
        "convolution_weight_gradient",
        "convolve",
        "convolve",
    ]
    again = traced(list(params.values()), [x, y])
    assert all(torch.equal(one, got[name]) for one, name in zip(again, got))


def _kernels_of(traced: Trace) -> list[str]:
    return sorted(str(node.target).split(".")[1] for node in traced.graph.nodes if "consilience" in str(node.target))


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "clients inside"])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("size", [(9, 8), (8, 8), (5, 16)], ids=str)
def test_a_pooled_convolution_and_its_gradient_are_those_of_torch(size: Any, padding: int, layout: str) -> None:
    """Also where a last row or column is in no pool, and where several values of a pool are equal."""
    geometry = convolution_kernels.Geometry((1, 1), (padding, padding), (1, 1))
    x, weight = drawn(CLIENTS, PICTURES, 4, *size, seed=0).round(), drawn(CLIENTS, 20, 4, 3, 3, seed=1).round()
    bias = drawn(CLIENTS, 20, seed=2).round()
    convolved = torch.stack([F.conv2d(x[k], weight[k], bias[k], 1, padding) for k in range(CLIENTS)]).requires_grad_()
    wanted = F.max_pool2d(convolved.relu().flatten(0, 1), 2).unflatten(0, (CLIENTS, PICTURES))
    above = drawn(*wanted.shape, seed=3)
    (gradient,) = torch.autograd.grad(wanted, convolved, above)
    if layout == "channels last":
        above = above.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    if layout == "clients inside":
        above = above.transpose(0, 1).contiguous().transpose(0, 1)
    order = (0, 1, 3, 4, 2)
    got, corners = convolution_kernels.convolve_and_pool(x, weight.permute(order).contiguous(), bias, geometry)
    assert torch.equal(got, wanted) and (corners == 4).equal(wanted == 0)
    height, width = convolved.shape[3:]
    assert torch.equal(convolution_kernels.unpool(above, corners, (height, width)), gradient)


def test_a_pool_passes_on_what_is_not_a_number() -> None:
    x = torch.zeros(1, 1, 1, 6, 6)
    x[..., 3, 3] = float("nan")
    geometry = convolution_kernels.Geometry((1, 1), (0, 0), (1, 1))
    got, _ = convolution_kernels.convolve_and_pool(x, torch.ones(1, 1, 3, 3, 1), None, geometry)
    wanted = F.max_pool2d(F.conv2d(x[0], torch.ones(1, 1, 3, 3)).relu(), 2)
    assert torch.equal(got[0].isnan(), wanted.isnan()) and got.isnan().any()


def _small(*behind: nn.Module, rectifier: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3), rectifier(), nn.Conv2d(8, 16, 3, padding=1), *behind, nn.Flatten())
    return nn.Sequential(*layers, nn.LazyLinear(4))


class _Twice(nn.Module):
    """Reads what is convolved before and behind the rectifier."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x.relu() + 0.5 * x, 2)


@pytest.mark.parametrize(
    ("net", "joined", "left"),  # left: rectifiers and their gradients that stay
    [
        (lambda: _small(nn.ReLU(), nn.MaxPool2d(2)), ["convolve_and_pool", "unpool"], 0),
        (lambda: _small(nn.ReLU(), nn.MaxPool2d(3, 2)), ["convolve"], 1),
        (lambda: _small(nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)), ["convolve"], 1),
        (lambda: _small(nn.ReLU(), nn.AvgPool2d(2)), ["convolve"], 1),
        (lambda: _small(nn.Tanh(), nn.MaxPool2d(2), rectifier=nn.Tanh), ["convolve"], 0),
        (lambda: _small(nn.ReLU()), ["convolve"], 1),
        (lambda: _small(nn.Unflatten(1, (4, 4)), nn.ReLU()), ["convolve"], 2),
        (lambda: _small(_Twice()), ["convolve"], 2),
    ],
    ids=[
        *("pools of 2 x 2", "pools that overlap", "pools over the edge", "means", "another activation", "no pools"),
        *("another shape before", "read before the rectifier"),
    ],
)
def test_rectifiers_and_pools_join_the_kernels(
    monkeypatch: pytest.MonkeyPatch, net: Any, joined: list[str], left: int
) -> None:
    net = net()
    net(drawn(1, 3, 9, 10, seed=0))  # makes the last layer
    net = exact.use_matmul(net)
    names = list(dict(net.named_parameters()))
    params = [torch.stack([p.detach() + 0.1 * drawn(*p.shape, seed=k) for k in range(3)]) for p in net.parameters()]
    batch = [drawn(3, 5, 3, 9, 10, seed=9), torch.arange(15).reshape(3, 5) % 4]
    monkeypatch.setattr(client_convolutions, "usable", lambda x, weight: grouped.grouped())
    monkeypatch.setattr(exact, "_on_gpu", lambda x: True)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, params, (x,)), y)

    traced = trace(lambda leaves, rows: list(vmap(grad(loss))(dict(zip(names, leaves)), *rows).values()), params, batch)
    wanted = traced(params, batch)
    rectified_convolutions.join_rectifiers(traced)
    rest = ["convolution_input_gradient", "convolution_weight_gradient", "convolution_weight_gradient", "convolve"]
    assert _kernels_of(traced) == sorted([*rest, *joined])
    rectifiers = (aten.relu.default, aten.threshold_backward.default)
    assert sum(node.target in rectifiers for node in traced.graph.nodes) == left
    for got, expected in zip(traced(params, batch), wanted, strict=True):
        assert gap(got, expected) < 1e-5


@pytest.mark.parametrize("length", [1, 7, 16])
def test_attention_over_short_sequences_is_that_of_torch(length: int) -> None:
    rows = drawn(CLIENTS, 4, length, 3 * 2 * 5, seed=0)

    def short(*given: Tensor) -> Tensor:
        return grouped.apply(attention._ShortCall(0.3), *given)

    def torchs(*given: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*given, scale=0.3)

    def loss(attend: Any, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (3, 2, 5)).permute(2, 0, 3, 1, 4).unbind(0)
        return (attend(*parts).transpose(1, 2).flatten(2).square() * torch.arange(10)).sum()

    wanted = torch.stack([grad(lambda x: loss(torchs, x))(x) for x in rows])
    assert gap(vmap(grad(lambda x: loss(short, x)))(rows), wanted) < 1e-5


def test_a_kernel_that_cannot_run_is_an_error_of_torchs_kind() -> None:
    import triton

    with pytest.raises(RuntimeError, match="cannot run on this GPU: out of it"), grouped.kernel_errors():
        raise triton.TritonError("out of it")
