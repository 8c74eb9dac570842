"""Memory layouts of pictures and of gradients of convolutions in a step that PyTorch's compiler runs.

The compiler predicts the layout of what `convolution_backward` returns, cuDNN returns another one for pictures in
channels-last format, and the compiled step stops with an error. Here the gradients are an operation of our own, which
returns them in the format in which cuDNN computes: channels-last if the picture or the weight is. Without it, ResNets
ran uncompiled in `streams`. The gradient of a bias becomes a sum, which the compiler joins with other passes over the
same values.

Group norms give contiguous pictures. These are converted to channels-last, which the compiler does while it writes
them; cuDNN would otherwise convert them for every convolution.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from consilience.engines.compiler.trace import Trace

aten = torch.ops.aten
GROUP_NORMS = (aten.native_group_norm.default, aten.native_group_norm_backward.default)
_NAME = "consilience::convolution_gradients"
_SCHEMA = (
    "(Tensor gradient, Tensor picture, Tensor weight, int[]? bias_sizes, int[] stride, int[] padding, int[] dilation, "
    "bool transposed, int[] output_padding, int groups, bool[] wanted) -> (Tensor, Tensor, Tensor)"
)


def fix_gradient_layouts(traced: Trace) -> None:
    """Replace the gradients of convolutions in a traced step that is to be compiled, in place."""
    nodes = [node for node in traced.graph.nodes if node.target is aten.convolution_backward.default]
    for node in nodes:
        _sum_for_bias(traced, node)
        node.target = operation()
    if nodes:
        traced.rewritten()


def _sum_for_bias(traced: Trace, node: fx.Node) -> None:
    gradient, wanted = node.args[0], node.args[-1]
    assert isinstance(gradient, fx.Node)
    for part in [part for part in node.users if part.target is operator.getitem and part.args[1] == 2]:
        with traced.graph.inserting_before(part):
            axes = [0, *range(2, len(gradient.meta["shape"]))]
            total = traced.graph.call_function(aten.sum.dim_IntList, (gradient, axes))
        total.meta = dict(part.meta)
        part.replace_all_uses_with(total)
        traced.graph.erase_node(part)
    node.args = (*node.args[:-1], [*wanted[:2], False])  # type: ignore[index, misc]


def write_channels_last(traced: Trace) -> None:
    """Convert the pictures that group norms give, and their gradients, in a traced step to be compiled, in place."""
    pictures = [
        part
        for node in traced.graph.nodes
        if node.target in GROUP_NORMS
        for part in node.users
        if part.target is operator.getitem and part.args[1] == 0 and len(part.meta["shape"]) == 4
    ]
    for picture in pictures:
        with traced.graph.inserting_after(picture):
            options: dict[str, Any] = {"memory_format": torch.channels_last}
            written = traced.graph.call_function(aten.clone.default, (picture,), options)
        stride = torch.empty(picture.meta["shape"], device="meta", memory_format=torch.channels_last).stride()
        written.meta = {**picture.meta, "stride": stride}
        picture.replace_all_uses_with(written, delete_user_cb=lambda user, written=written: user is not written)
    if pictures:
        traced.rewritten()


@cache
def operation() -> Any:
    """The operation, registered at its first use: `torch.library` is not needed before."""
    made = torch.library.custom_op(_NAME, _gradients, mutates_args=(), schema=_SCHEMA)
    made.register_fake(_shapes)
    return torch.ops.consilience.convolution_gradients.default


def _gradients(gradient: Tensor, picture: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients of the picture, the weight and the bias; an empty tensor for each that is not wanted."""
    found = aten.convolution_backward(gradient, picture, weight, *rest)
    layouts = (*[_format(picture, weight)] * 2, torch.contiguous_format)
    return tuple(
        gradient.new_empty(0) if value is None else value.contiguous(memory_format=layout)
        for value, layout in zip(found, layouts)
    )


def _shapes(gradient: Tensor, picture: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Tensors with the shapes and layouts of `_gradients`, without values."""
    layout = _format(picture, weight)
    likes = [(picture.shape, layout), (weight.shape, layout), (gradient.shape[1:2], torch.contiguous_format)]
    return tuple(
        gradient.new_empty(shape).contiguous(memory_format=layout) if wanted else gradient.new_empty(0)
        for wanted, (shape, layout) in zip(rest[-1], likes)
    )


def _format(picture: Tensor, weight: Tensor) -> torch.memory_format:
    """The layout in which libraries compute a convolution of these."""
    some = any(one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last) for one in (picture, weight))
    return torch.channels_last if some else torch.contiguous_format
