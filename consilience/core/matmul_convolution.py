"""Convolution as unfold + matrix product: over a group of clients it becomes one batched product.

vmap turns a convolution with one kernel per client into a grouped convolution, which GPU libraries run slowly.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class MatmulConv2d(nn.Module):
    """The same layer as an nn.Conv2d, computed differently."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.kernel, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        assert not isinstance(layer.padding, str)
        self.padding = layer.padding

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, self.kernel, self.dilation, self.padding, self.stride)  # [B, C kh kw, L]
        out = F.linear(columns.transpose(1, 2), self.weight.flatten(1), self.bias)  # [B, L, O]
        return out.transpose(1, 2).unflatten(-1, self._size(x))

    def _size(self, x: Tensor) -> tuple[int, int]:
        height, width = (
            (x.shape[2 + i] + 2 * int(self.padding[i]) - self.dilation[i] * (self.kernel[i] - 1) - 1) // self.stride[i]
            + 1
            for i in range(2)
        )
        return height, width


def use_matmul(module: nn.Module) -> nn.Module:
    """Swap every plain 2-d convolution, in place."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            plain = type(child) is nn.Conv2d and child.groups == 1 and child.padding_mode == "zeros"
            if plain and not isinstance(child.padding, str):
                setattr(parent, name, MatmulConv2d(child))  # type: ignore[arg-type]
    return module
