"""Convolutions of a group of clients, joined with the rectifier and the pooling behind them.

On a GPU such a convolution is a kernel of ours (`layers/client_convolutions.py`). It can leave out negative values and
take the largest of 2 x 2 before it writes them, and its gradient can leave out what the rectifier before it did. The
results are the same bits; passes over whole pictures fall away.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from consilience.engines.compiler.trace import Trace

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)
COPIES = (aten.clone.default, aten.contiguous.default)


def join_rectifiers(traced: Trace) -> None:
    """Rewrite a traced step, in place."""
    graph = traced.graph
    for node in _calls(graph, "convolve"):
        rectifier = _only_reader(node)
        if rectifier is None or rectifier.target != aten.relu.default or rectifier.meta["shape"] != node.meta["shape"]:
            continue
        pooling = _pooling(rectifier)
        if pooling is not None:
            _join_pooling(graph, node, pooling)
        else:
            joint = _insert(graph, node, node.target, *node.args, True, meta=rectifier.meta)
            rectifier.replace_all_uses_with(joint)
    for node in _calls(graph, "convolution_input_gradient"):
        reader = _only_reader(node)
        if reader is not None and _rectifies(reader) and reader.args[1].meta["shape"] == node.meta["shape"]:
            joint = _insert(graph, reader, node.target, *node.args, reader.args[1], meta=node.meta)
            reader.replace_all_uses_with(joint)
    traced.rewritten()


def _calls(graph: fx.Graph, name: str) -> list[Any]:
    """The calls of one of our kernels."""
    return [node for node in graph.nodes if str(node.target) == f"consilience.{name}.default"]


class Pooling(NamedTuple):
    """A rectifier whose values are read by a pooling of 2 x 2 and by its gradient only."""

    rectifier: Any
    pool: Any
    gradient: Any  # of the pooling
    rectified_gradient: Any  # that of the rectifier, from it


def _pooling(rectifier: Any) -> Pooling | None:
    readers = list(_readers(rectifier))
    kinds = {reader.target: reader for reader in readers}
    pool = kinds.pop(aten.max_pool2d_with_indices.default, None)
    gradient = kinds.pop(aten.max_pool2d_with_indices_backward.default, None)
    back = kinds.pop(aten.threshold_backward.default, None)
    if pool is None or kinds or len(readers) != len([one for one in (pool, gradient, back) if one is not None]):
        return None
    pictures = rectifier.meta["shape"]
    flat = (pictures[0] * pictures[1], *pictures[2:])
    if tuple(pool.args[0].meta["shape"]) != flat or not _halves(pool.args[1:]):
        return None
    if (gradient is None) != (back is None):
        return None
    if gradient is not None and back is not None:
        indices = _unviewed(gradient.args[-1], copies=True)
        known = indices.target is operator.getitem and indices.args == (pool, 1) and _halves(gradient.args[2:-1])
        joined = _rectifies(back) and _only_reader(gradient) is back and back.meta["shape"] == pictures
        if not (known and joined):
            return None
    return Pooling(rectifier, pool, gradient, back)


def _halves(arguments: tuple[Any, ...]) -> bool:
    """Whether the pools are 2 x 2 values, side by side; a last row or column that is left over is in none."""
    usual: tuple[Any, ...] = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    kernel, stride, padding, dilation, ceil = (*arguments, *usual[len(arguments) :])
    plain = list(padding) == [0, 0] and list(dilation) == [1, 1] and not ceil
    return plain and list(kernel) == [2, 2] and list(stride) in ([2, 2], [])


def _join_pooling(graph: fx.Graph, node: Any, found: Pooling) -> None:
    clients, pictures, outputs, height, width = found.rectifier.meta["shape"]
    size = (height // 2, width // 2)
    pooled_shape, flat_shape = [clients, pictures, outputs, *size], [clients * pictures, outputs, *size]
    operations, known = torch.ops.consilience, {name: node.meta[name] for name in ("dtype", "device")}
    joint = _insert(graph, node, operations.convolve_and_pool.default, *node.args, meta={})
    pooled, corners = (
        _insert(graph, node, operator.getitem, joint, at, meta={**known, "dtype": dtype, **_last(pooled_shape)})
        for at, dtype in enumerate((known["dtype"], torch.uint8))
    )
    flat = _insert(graph, node, aten.view.default, pooled, flat_shape, meta={**known, **_last(flat_shape)})
    for part in list(found.pool.users):
        if part.args[1] == 0:
            part.replace_all_uses_with(flat)
    if found.gradient is not None and found.rectified_gradient is not None:
        above: Any = found.gradient.args[0]
        meta = {
            **known,
            "shape": torch.Size(pooled_shape),
            "stride": (pictures * above.meta["stride"][0], *above.meta["stride"]),
        }
        above = _insert(graph, found.gradient, aten.view.default, above, pooled_shape, meta=meta)
        meta = {**known, **_last([clients, pictures, outputs, height, width])}
        back = _insert(graph, found.gradient, operations.unpool.default, above, corners, [height, width], meta=meta)
        found.rectified_gradient.replace_all_uses_with(back)


def _last(shape: list[int]) -> dict[str, Any]:
    """The description of pictures whose channels lie last."""
    channels_last = torch.empty(*shape[:-3], *shape[-2:], shape[-3], device="meta").movedim(-1, -3)
    return {"shape": channels_last.shape, "stride": channels_last.stride()}


def _insert(graph: fx.Graph, place: Any, target: Any, *arguments: Any, meta: dict[str, Any]) -> Any:
    with graph.inserting_before(place):
        made = graph.call_function(target, arguments)
    made.meta = dict(meta)
    return made


def _rectifies(node: Any) -> bool:
    """Whether it is the gradient of a rectifier."""
    return bool(node.target == aten.threshold_backward.default and node.args[2] == 0)


def _readers(node: Any) -> Iterator[Any]:
    """What reads its values, itself or a view of it with the same order of dimensions."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _only_reader(node: Any) -> Any:
    readers = list(_readers(node))
    return readers[0] if len(readers) == 1 else None


def _unviewed(node: Any, *, copies: bool) -> Any:
    while _is_view(node) or (copies and node.target in COPIES):
        node = node.args[0]
    return node


def _is_view(node: Any) -> bool:
    in_order = node.target == aten.permute.default and list(node.args[1]) == list(range(len(node.args[1])))
    return in_order or node.target in VIEWS
