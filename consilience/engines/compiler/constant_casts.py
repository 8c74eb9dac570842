"""Casts of frozen weights, made once instead of at every step.

In half precision each frozen weight and bias is cast before it is used: for BERT base 144 small kernels a step, whose
cost is within the variation between runs on an H200. Large models keep casting, since the copies would take half as
much memory again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from consilience.engines.compiler.trace import Trace

aten = torch.ops.aten
AT_MOST = 2**30  # bytes of copies


def cast_constants_once(traced: Trace) -> None:
    """Replace casts of constants in a traced step by constants."""
    found = {node: value for node in traced.graph.nodes if (value := _cast(traced, node)) is not None}
    if not found or sum(value.nbytes for value in found.values()) > AT_MOST:
        return
    for node, value in found.items():
        name = f"cast_{node.name}"
        traced.constants[name] = value
        setattr(traced.module, name, value)
        with traced.graph.inserting_before(node):
            constant = traced.graph.create_node("get_attr", name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
    traced.rewritten()


def _cast(traced: Trace, node: fx.Node) -> Tensor | None:
    """The value of a cast of a constant, as it lies or transposed."""
    if node.target != aten._to_copy.default:
        return None
    source: Any = node.args[0]
    turned = isinstance(source, fx.Node) and source.target == aten.t.default
    constant: Any = source.args[0] if turned else source
    if not isinstance(constant, fx.Node) or constant.op != "get_attr":
        return None
    value = traced.constants[str(constant.target)]
    return aten._to_copy.default(value.t() if turned else value, **node.kwargs)
