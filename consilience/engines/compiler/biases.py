"""Fusion of the bias of a frozen dense layer into its matrix product.

Such a layer is one product over the rows of all clients, after which vmap adds the bias in a separate pass that reads
and writes the layer's whole output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from consilience.engines.compiler.trace import Trace

aten = torch.ops.aten
RESHAPED = (aten.view.default, aten._unsafe_view.default)


def add_biases_in_products(traced: Trace) -> None:
    """Rewrite `bias + rows @ weight` in a traced step, in place."""
    for node in list(traced.graph.nodes):
        found = _biased(node)
        if found:
            bias, product = found
            with traced.graph.inserting_before(node):
                joined = traced.graph.call_function(aten.addmm.default, (bias, *product.args))
                joined.meta = dict(product.meta)
                shown = traced.graph.call_function(aten.view.default, (joined, list(node.meta["shape"])))
                shown.meta = dict(node.meta)
            node.replace_all_uses_with(shown)
    traced.rewritten()


def _biased(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """(bias, product) if the node adds a vector to every row of a product that nothing else reads."""
    if node.target != aten.add.Tensor or node.kwargs or not all(isinstance(part, fx.Node) for part in node.args):
        return None
    for bias, shown in (node.args, node.args[::-1]):
        product = shown
        while product.target in RESHAPED and len(product.users) == 1:
            product = product.args[0]
        if product.target != aten.mm.default or len(product.users) != 1 or len(shown.users) != 1:
            continue
        width, kinds = product.meta["shape"][1], {part.meta.get("dtype") for part in (bias, product, node)}
        if tuple(bias.meta.get("shape", ())) == (width,) and shown.meta["shape"][-1] == width and len(kinds) == 1:
            return bias, product
    return None
