"""The weight gradient of a first convolution, whose pictures have few channels, as a sum of matrix products.

Of a GPU library's kernels for it, those that add in a fixed order are many times slower than the others: for a small
network on CIFAR-10, a third of all kernel time went there. As a sum of one product per image its cost is negligible.

It pays: on an H200, a round of 20 clients of that network takes 198 ms instead of 361 (docs/performance.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from consilience.engines.compiler.trace import Trace

aten = torch.ops.aten
THIN = 64  # values under a kernel: three channels of 3 x 3 have 27


def multiply_thin_gradients(traced: Trace) -> None:
    """Rewrite these gradients in a traced step, in place."""
    for node in list(traced.graph.nodes):
        if _is_thin(node):
            with traced.graph.inserting_before(node):
                _multiply(traced.graph, node)
    traced.rewritten()


def _is_thin(node: Any) -> bool:
    if node.target != aten.convolution_backward.default:
        return False
    gradient, picture, weight, *_, dilation, transposed, _, groups, wanted = node.args
    plain = len(picture.meta["shape"]) == 4 and not transposed and groups == 1 and set(dilation) == {1}
    exact = gradient.meta["dtype"] in (torch.float32, torch.float64)  # products of pictures are rounded before the sum
    return plain and exact and list(wanted)[:2] == [False, True] and weight.meta["shape"][1:].numel() <= THIN


def _multiply(graph: fx.Graph, node: Any) -> None:
    gradient, picture, weight, _, stride, (top, left), *_ = node.args
    pictures, (outs, channels, height, width) = picture.meta["shape"][0], weight.meta["shape"]

    def call(operation: Any, *arguments: Any, **options: Any) -> fx.Node:
        made = graph.call_function(operation, arguments, options)
        value = operation(*(_shadow(a) if isinstance(a, fx.Node) else a for a in arguments), **options)
        made.meta = {"shape": value.shape, "dtype": value.dtype, "stride": value.stride()}
        made.meta["device"] = gradient.meta["device"]
        return made

    for part in list(node.users):  # (of the picture,) of the weight, of the bias
        if part.args[1] == 1:
            channels_last = part.meta["stride"][1] == 1 and channels > 1
            padded = call(aten.constant_pad_nd.default, picture, [left, left, top, top]) if top or left else picture
            under = call(aten.unfold.default, padded, 2, height, stride[0])
            under = call(aten.unfold.default, under, 3, width, stride[1])
            order = [0, 2, 3, 4, 5, 1] if channels_last else [0, 2, 3, 1, 4, 5]
            under = call(aten.permute.default, under, order)
            rows = call(aten.clone.default, under, memory_format=torch.contiguous_format)
            rows = call(aten.view.default, rows, [pictures, -1, channels * height * width])
            flat = call(aten.reshape.default, gradient, [pictures, outs, -1])
            total = call(aten.sum.dim_IntList, call(aten.bmm.default, flat, rows), [0])
            shape = [outs, height, width, channels] if channels_last else [outs, channels, height, width]
            total = call(aten.view.default, total, shape)
            part.replace_all_uses_with(call(aten.permute.default, total, [0, 3, 1, 2]) if channels_last else total)
        elif part.args[1] == 2:
            part.replace_all_uses_with(call(aten.sum.dim_IntList, gradient, [0, 2, 3]))


def _shadow(node: Any) -> Tensor:
    """A tensor with the node's shape and layout but no values."""
    return torch.empty_strided(node.meta["shape"], node.meta["stride"], dtype=node.meta["dtype"], device="meta")
