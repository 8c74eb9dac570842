"""Convolutions of a group of clients, each with weights of its own, by kernels that form no columns.

vmap turns them into a grouped convolution, which GPU libraries run slowly, and as a matrix product each needs its
columns in memory: kernel height x width times its input. `convolution_kernels` forms them as it multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from consilience.layers import grouped

if TYPE_CHECKING:
    from consilience.layers.convolution_kernels import Geometry

LARGEST = 2**30  # values of one client's pictures, before or after: the kernels count them in 32 bits


def usable(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels compute this: in tf32, in a group, on a GPU.

    In bfloat16, in which they have not been run on a GPU, convolutions are products with columns.
    """
    fast = torch.backends.cuda.matmul.allow_tf32 and not torch.is_autocast_enabled("cuda")
    single = x.dtype == weight.dtype == torch.float32
    small = x.numel() // x.shape[1] * max(weight.shape[:2]) < LARGEST
    return fast and single and small and grouped.runs_kernels(x) and grouped.grouped()


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Sequence[int]) -> Tensor:
    """One client's convolution, inside vmap; the geometry is stride, padding and dilation."""
    result: Tensor = grouped.apply(_Call(*geometry), x, weight, bias)
    return result


class _Call:
    def __init__(self, *geometry: Sequence[int]) -> None:
        self._geometry = geometry

    def forward(self, clients: int | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output; with a number of clients, all are stacked in front."""
        assert clients is not None, "`usable` says when there is a group"
        self._x, self._weight, self._biased = x, weight, bias is not None
        result: Tensor = torch.ops.consilience.convolve(x, _channels_last(weight), bias, *self._geometry)
        return result

    def backward(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients by x, weight and bias; where one is not used, its operation is dropped from the trace."""
        operations, size, kernel = torch.ops.consilience, self._x.shape[3:], self._weight.shape[3:]
        turned = _channels_last(self._weight.transpose(1, 2))
        by_x = operations.convolution_input_gradient(grad, turned, size, *self._geometry)
        summed = operations.convolution_weight_gradient(grad, self._x, kernel, *self._geometry)
        by_weight = summed[:, :-1].unflatten(1, (*kernel, -1)).permute(0, 4, 3, 1, 2).contiguous()
        return by_x, by_weight, summed[:, -1] if self._biased else None


def _channels_last(weight: Tensor) -> Tensor:
    """[G, O, C, h, w] -> [G, O, h, w, C]"""
    return weight.permute(0, 1, 3, 4, 2).contiguous()


def _geometry(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Geometry:
    from consilience.layers.convolution_kernels import Geometry

    return Geometry(*((pair[0], pair[1]) for pair in (stride, padding, dilation)))


def _define(name: str, schema: str) -> Any:
    """Decorates what computes it: an operation that traces and PyTorch's compiler see as one."""
    return torch.library.custom_op(f"consilience::{name}", mutates_args=(), schema=schema)


_GEOMETRY = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"


@_define("convolve", f"(Tensor x, Tensor weight, Tensor? bias, {_GEOMETRY}, bool rectified=False) -> Tensor")
def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    rectified: bool = False,
) -> Tensor:
    from consilience.layers import convolution_kernels as kernels

    with torch.cuda.device_of(x), grouped.kernel_errors():
        return kernels.convolve(x, weight, bias, _geometry(stride, padding, dilation), rectified=rectified)


@_convolve.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    rectified: bool = False,
) -> Tensor:
    return _pictures(x, weight.shape[1], _size(x, weight, stride, padding, dilation))


@_define("convolve_and_pool", f"(Tensor x, Tensor weight, Tensor? bias, {_GEOMETRY}) -> (Tensor, Tensor)")
def _convolve_and_pool(
    x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Sequence[int]
) -> tuple[Tensor, Tensor]:
    from consilience.layers import convolution_kernels as kernels

    with torch.cuda.device_of(x), grouped.kernel_errors():
        return kernels.convolve_and_pool(x, weight, bias, _geometry(*geometry))


@_convolve_and_pool.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Sequence[int]) -> tuple[Tensor, Tensor]:
    height, width = _size(x, weight, *geometry)
    pooled = _pictures(x, weight.shape[1], (height // 2, width // 2))
    return pooled, torch.empty_like(pooled, dtype=torch.uint8)


@_define("unpool", "(Tensor grad, Tensor corners, SymInt[] size) -> Tensor")
def _unpool(grad: Tensor, corners: Tensor, size: Sequence[int]) -> Tensor:
    from consilience.layers import convolution_kernels as kernels

    with torch.cuda.device_of(grad), grouped.kernel_errors():
        return kernels.unpool(grad, corners, (size[0], size[1]))


@_unpool.register_fake
def _(grad: Tensor, corners: Tensor, size: Sequence[int]) -> Tensor:
    return _pictures(grad, grad.shape[2], (size[0], size[1]))


@_define(
    "convolution_input_gradient",
    f"(Tensor grad, Tensor weight, SymInt[] size, {_GEOMETRY}, Tensor? positive=None) -> Tensor",
)
def _by_input(
    grad: Tensor,
    weight: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    positive: Tensor | None = None,
) -> Tensor:
    from consilience.layers import convolution_kernels as kernels

    geometry = _geometry(stride, padding, dilation)
    with torch.cuda.device_of(grad), grouped.kernel_errors():
        return kernels.input_gradient(grad, weight, (size[0], size[1]), geometry, positive)


@_by_input.register_fake
def _(
    grad: Tensor,
    weight: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    positive: Tensor | None = None,
) -> Tensor:
    return _pictures(grad, weight.shape[1], (size[0], size[1]))


@_define("convolution_weight_gradient", f"(Tensor grad, Tensor x, SymInt[] kernel, {_GEOMETRY}) -> Tensor")
def _by_weight(grad: Tensor, x: Tensor, kernel: Sequence[int], *geometry: Sequence[int]) -> Tensor:
    from consilience.layers import convolution_kernels as kernels

    with torch.cuda.device_of(x), grouped.kernel_errors():
        return kernels.weight_gradient(grad, x, (kernel[0], kernel[1]), _geometry(*geometry))


@_by_weight.register_fake
def _(grad: Tensor, x: Tensor, kernel: Sequence[int], *geometry: Sequence[int]) -> Tensor:
    weights = kernel[0] * kernel[1] * x.shape[2] + 1  # the bias is the last
    return x.new_empty(x.shape[0], weights, grad.shape[2])


def _size(x: Tensor, weight: Tensor, *geometry: Sequence[int]) -> tuple[int, int]:
    return _geometry(*geometry).output_size((x.shape[3], x.shape[4]), (weight.shape[2], weight.shape[3]))


def _pictures(x: Tensor, channels: int, size: tuple[int, int]) -> Tensor:
    """Memory for pictures, channels last."""
    return x.new_empty(*x.shape[:2], *size, channels).permute(0, 1, 4, 2, 3)
