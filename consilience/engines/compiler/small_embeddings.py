"""The gradient of an embedding with few entries (token types of a transformer) as a matrix product.

A GPU's kernel that adds in a fixed order adds the rows of one entry one after another: with two entries and forty
thousand tokens, it waits for thousands of additions. As a product with a one-hot matrix its cost is negligible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from consilience.engines.compiler.trace import Trace

aten = torch.ops.aten
FEW = 256  # entries, of all clients together


def multiply_small_embeddings(traced: Trace) -> None:
    """Rewrite these gradients in a traced step, in place."""
    for node in list(traced.graph.nodes):
        if _is_small(node):
            with traced.graph.inserting_before(node):
                node.replace_all_uses_with(_product(traced.graph, node))
    traced.rewritten()


def _is_small(node: Any) -> bool:
    if node.target != aten.embedding_dense_backward.default:
        return False
    _, _, entries, padding, by_frequency = node.args
    return entries <= FEW and padding == -1 and not by_frequency


def _product(graph: fx.Graph, node: Any) -> fx.Node:
    """[entries, size]: which token is of which entry, times the gradient by the tokens."""
    gradient, tokens, entries, *_ = node.args
    device, kind = node.meta["device"], node.meta["dtype"]
    numbers = graph.call_function(aten.arange.default, (entries,), {"device": device})
    flat = graph.call_function(aten.reshape.default, (tokens, [1, -1]))
    same = graph.call_function(aten.eq.Tensor, (graph.call_function(aten.unsqueeze.default, (numbers, 1)), flat))
    weights = graph.call_function(aten._to_copy.default, (same,), {"dtype": kind})
    rows = graph.call_function(aten.reshape.default, (gradient, [-1, node.meta["shape"][-1]]))
    product = graph.call_function(aten.mm.default, (weights, rows))
    product.meta = dict(node.meta)
    return product
