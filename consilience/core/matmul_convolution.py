"""Convolution as shifts + a matrix product: over a group of clients it becomes one batched product.

vmap turns a convolution with one kernel per client into a grouped convolution, which GPU libraries run slowly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MatmulConv2d(nn.Module):
    """The same layer as an nn.Conv2d, computed differently."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.kernel, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        assert not isinstance(layer.padding, str)
        self.padding = (layer.padding[0], layer.padding[1])

    def forward(self, x: Tensor) -> Tensor:
        (top, left), (down, right) = self.padding, self.stride
        x = F.pad(x, (left, left, top, top))
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel)]
        height, width = ((x.shape[2 + i] - reach[i]) // self.stride[i] + 1 for i in (0, 1))
        # shifted views, not F.unfold: the gradient is then a sum of padded slices, which needs no atomic additions
        shifted = [
            x[:, :, i : i + (height - 1) * down + 1 : down, j : j + (width - 1) * right + 1 : right]
            for i in range(0, self.kernel[0] * self.dilation[0], self.dilation[0])
            for j in range(0, self.kernel[1] * self.dilation[1], self.dilation[1])
        ]
        columns = torch.stack(shifted, 2).flatten(1, 2).flatten(2)  # [B, C kh kw, L]
        out = F.linear(columns.transpose(1, 2), self.weight.flatten(1), self.bias)  # [B, L, O]
        return out.transpose(1, 2).unflatten(-1, (height, width))


def use_matmul(module: nn.Module) -> nn.Module:
    """Swap every plain 2-d convolution, in place."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            plain = type(child) is nn.Conv2d and child.groups == 1 and child.padding_mode == "zeros"
            if plain and not isinstance(child.padding, str):
                setattr(parent, name, MatmulConv2d(child))  # type: ignore[arg-type]
    return module
