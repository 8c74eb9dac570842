"""Gradients that are matrix products, as a dense layer's is: their factors are enough for a gradient step.

A product can be added to what lies where it is written. Then the gradient itself is never stored: for a wide layer,
whose gradient is as large as its weights and used once, that is half of what a step moves through memory.

It pays: on an H200, the steps of 100 clients of the MLP take 3.2 ms instead of 3.6 (docs/performance.md).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from consilience.engines.compiler.trace import origin

aten = torch.ops.aten
PRODUCTS = (aten.bmm.default, aten.mm.default)
VIEWS = (
    aten.transpose.int,
    aten.t.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)


def factors(value: fx.Node, target: fx.Node, overwritten: list[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """(left, right) if the value is their product, in the order in which the target lies, and nobody else reads it."""
    way: list[fx.Node] = []
    node = value
    if torch.empty(target.meta["shape"], device="meta").stride() != target.meta["stride"]:
        return None
    while node.target in VIEWS and len(node.users) == 1:
        way.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in PRODUCTS or len(node.users) != 1 or node.meta["dtype"] != value.meta["dtype"]:
        return None
    shown = torch.empty(node.meta["shape"], device="meta")
    for step in reversed(way):
        shown = step.target(shown, *step.args[1:], **step.kwargs)  # type: ignore[operator]
    left, right = node.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if not shown.is_contiguous() or {origin(left), origin(right)} & set(overwritten):
        return None
    return left, right


def add_product(target: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """target += alpha left @ right, with as many matrices in the target as in the factors."""
    shape = (*left.shape[:-1], right.shape[-1])
    if left.dim() == 3:
        target.view(shape).baddbmm_(left, right, alpha=alpha)
    else:
        target.view(shape).addmm_(left, right, alpha=alpha)
