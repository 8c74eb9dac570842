"""Gradients of pictures in the memory layout of the pictures.

In a channels-last network the gradient that comes back from a dense layer or a mean over pixels is contiguous.
PyTorch's CPU kernels then read two layouts at once, or write one and copy it to the other, which takes 5 to 25 times
as long as in one layout; a copy beforehand costs less.

It pays: a max-pool's gradient takes 130 us instead of 790 in a step of 9.3 ms of the 2-conv CNN (docs/performance.md).
"""

from __future__ import annotations

from typing import Any

import torch

from consilience.engines.compiler.trace import Trace

aten = torch.ops.aten
ELEMENTWISE = (  # (gradient, picture, ...): every value is computed from a few others, whatever the layout
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.threshold_backward.default,
)


def lay_out_gradients(traced: Trace) -> None:
    """Convert gradients in a traced step, where the picture is channels-last and they are not."""
    for node in list(traced.graph.nodes):
        if node.target in ELEMENTWISE and _channels_last(node.args[1]) and not _channels_last(node.args[0]):
            with traced.graph.inserting_before(node):
                options: dict[str, Any] = {"memory_format": torch.channels_last}
                gradient = traced.graph.call_function(aten.contiguous.default, (node.args[0],), options)
            shape = node.args[0].meta["shape"]
            stride = torch.empty(shape, device="meta", memory_format=torch.channels_last).stride()
            gradient.meta = {**node.args[0].meta, "stride": stride}
            node.args = (gradient, *node.args[1:])
    traced.rewritten()


def _channels_last(node: Any) -> bool:
    shape, stride = node.meta["shape"], node.meta["stride"]
    if len(shape) != 4:
        return False
    shadow = torch.empty_strided(shape, stride, device="meta")
    return shadow.is_contiguous(memory_format=torch.channels_last) and not shadow.is_contiguous()
