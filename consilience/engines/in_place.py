"""A traced step rewritten to update its carry in place: dozens of tiny kernels a step fewer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
Flat = list[Tensor]
Moves = list[float | None]
"""For each leaf of the carry: alpha if its result is `leaf + alpha * output`, else None."""


class InPlace:
    """A traced step that overwrites its carry; `compile` runs its operations through PyTorch's compiler."""

    def __init__(self, traced: Any, leaves: int, *, keeps_old: bool = False, compile: bool = False) -> None:
        # a step that may have to keep the old carry (a masked one, on a GPU) cannot overwrite it on the way
        self.moves: Moves = [None] * leaves if keeps_old else work_in_place(traced, leaves)
        self._traced = traced
        self.run: Any = torch.compile(traced, dynamic=False) if compile else traced

    def give_up_compiling(self) -> None:
        """Run the operations one by one from now on."""
        self.run = self._traced

    def __call__(self, carry: Flat, *rest: Flat) -> None:
        """One step: results that are additions are added by one fused operation, the others copied."""
        after = self.run(carry, *rest)
        added: dict[float, tuple[Flat, Flat]] = {}
        kept: Flat = []
        new: Flat = []
        for leaf, result, alpha in zip(carry, after, self.moves):
            if alpha is not None:
                to, what = added.setdefault(alpha, ([], []))
                to.append(leaf)
                what.append(result)
            elif result is not leaf:
                kept.append(leaf)
                new.append(result)
        for alpha, (to, what) in added.items():
            torch._foreach_add_(to, what, alpha=alpha)
        copy_all(kept, new)


def copy_all(targets: Flat, sources: Flat) -> None:
    """Copy lists of tensors with one kernel per dtype rather than one per tensor, where the layouts agree."""
    alike: dict[torch.dtype, tuple[Flat, Flat]] = {}
    for target, source in zip(targets, sources):
        if target.stride() == source.stride():
            to, of = alike.setdefault(target.dtype, ([], []))
            to.append(target)
            of.append(source)
        else:
            target.copy_(source)
    for to, of in alike.values():
        torch._foreach_copy_(to, of)


def work_in_place(traced: Any, leaves: int) -> Moves:
    """Rewrite the graph, whose first `leaves` inputs are the carry and whose outputs are the next one.

    A leaf that the step copies, changes and returns (batch norm's statistics) is changed directly. A leaf that ends as
    `leaf + alpha x` (a gradient step) returns x instead: the caller adds all of them in one fused operation.
    """
    graph: fx.Graph = traced.graph
    carry = [node for node in graph.nodes if node.op == "placeholder"][:leaves]
    (output,) = (node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    moves: Moves = [None] * leaves
    for index, (leaf, result) in enumerate(zip(carry, results)):
        copy = result.args[0] if _changes_in_place(result) else result
        if copy.target == aten.clone.default and copy.args[0] is leaf and len(leaf.users) == 1:
            copy.replace_all_uses_with(leaf)
            graph.erase_node(copy)
            results[index] = leaf
        elif _is_move(result, leaf, output):
            moves[index] = float(result.kwargs.get("alpha", 1.0))
            results[index] = result.args[1]
        elif result is not leaf and _source(result).op == "placeholder":  # an old value, kept beside a new one
            with graph.inserting_before(output):
                results[index] = graph.call_function(aten.clone.default, (result,))
    output.args = (results,)
    graph.eliminate_dead_code()
    traced.recompile()
    return moves


def _changes_in_place(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (aten.add_.Tensor, aten.copy_.default)


def _source(node: fx.Node) -> fx.Node:
    """The node whose memory this one shows, through views of views."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target._schema.returns[0].alias_info is not None:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_move(result: fx.Node, leaf: fx.Node, output: fx.Node) -> bool:
    return (
        result.target == aten.add.Tensor
        and result.args[0] is leaf
        and isinstance(result.args[1], fx.Node)
        and list(result.users) == [output]
        and _source(result.args[1]).op != "placeholder"  # which may be overwritten before it is added
        and result.meta["val"].dtype == leaf.meta["val"].dtype == result.args[1].meta["val"].dtype
        and result.meta["val"].shape == result.args[1].meta["val"].shape
    )
